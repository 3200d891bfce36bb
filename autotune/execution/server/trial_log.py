"""Keeps the log of a trial small while it is written: its first part, its last part and a sentence.

Everything that a trial prints goes straight into the file, which no process has to read, so that
output never waits and never disturbs a timed training. The trial server looks at the size of the
file every few seconds. Where it is too large, the end is moved to behind the first part, and a line
between them says how many bytes were left out. Output is appended (O_APPEND), so that the trial
goes on writing at the new end. What it writes in the microseconds in which the file is cut is left
out, too, and not counted: a trial that prints at full speed loses some lines so.
"""

import os
import stat
from pathlib import Path

FIRST_BYTES = 2**20
LAST_BYTES = 3 * 2**20
"""What is kept of a log that is too large: its first part, and at least so much of its end."""
LARGEST_LOG_BYTES = 2**23
"""A larger log is shortened."""
MOST_WRITTEN_BYTES = 2**30
"""A trial that has written more is ended: that is output without end."""
CHECK_SECONDS = 2.0
"""How often the size of a log is checked at least."""
_CHECK_SECONDS_OF_A_FLOOD = 0.1
"""The same for a log that had to be shortened at the last check."""
_MOST_COPIES = 3
"""How often to look for what was written while the end was copied; a flood is never copied up."""
_LINE_BYTES = 80


class TrialLog:
    """The log of one process of the trial server, which alone shortens it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._left_out_bytes = 0
        self._is_flooded = False

    @property
    def check_seconds(self) -> float:
        """After how long to call `shorten` again."""
        return _CHECK_SECONDS_OF_A_FLOOD if self._is_flooded else CHECK_SECONDS

    def shorten(self) -> int:
        """Shortens the log where it is too large; returns how many bytes were written to it in all.

        Does nothing to a file that the trial has put in its place, such as a link.
        """
        self._is_flooded = False
        try:
            state = self.file.lstat()
            if not stat.S_ISREG(state.st_mode):
                return 0
            written = state.st_size
            if self._left_out_bytes:
                written += self._left_out_bytes - _LINE_BYTES
            if state.st_size > LARGEST_LOG_BYTES:
                self._is_flooded = True
                self._leave_out_the_middle()
            return written
        except OSError:  # not there yet, or its disk does not answer
            return 0

    def _leave_out_the_middle(self) -> None:
        log = os.open(self.file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            end = os.fstat(log).st_size
            begins_at = end - LAST_BYTES
            is_shortened = os.pread(log, _LINE_BYTES, FIRST_BYTES) == self._sentence()
            left_out = begins_at - FIRST_BYTES - (_LINE_BYTES if is_shortened else 0)
            position = FIRST_BYTES + _LINE_BYTES
            for _ in range(1 + _MOST_COPIES):
                tail = os.pread(log, LAST_BYTES, begins_at)
                if not tail:
                    break
                position += os.pwrite(log, tail, position)
                begins_at += len(tail)
            left_out += os.fstat(log).st_size - begins_at
            os.ftruncate(log, position)
            self._left_out_bytes += left_out
            os.pwrite(log, self._sentence(), FIRST_BYTES)
        finally:
            os.close(log)

    def _sentence(self) -> bytes:
        """Returns the line that stands for what was left out; its length is always the same."""
        text = f"[autotune: about {self._left_out_bytes} bytes of this log were left out here]"
        return b"\n" + text.encode().ljust(_LINE_BYTES - 2) + b"\n"
