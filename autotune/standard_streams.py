"""Standard output and error of a process whose work matters more than what it shows.

`protect_streams` replaces `sys.stdout` and `sys.stderr`:

- The *display*, stderr, drops what cannot be written, and nobody waits for it: its disk is full,
  its reader has gone, its terminal was closed or is stopped by Ctrl-S. A search goes on.
- The *answer*, stdout, is never dropped unsaid. It waits for a reader that is slow, and raises
  OutputLost where it cannot be written.

A standard stream that was closed is opened on /dev/null, so that no file of ours gets its number:
a traceback would otherwise be written into a database.
"""

import atexit
import errno
import io
import os
import select
import stat
import sys
import termios
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from autotune.errors import OutputLost

_MOST_WAITING_BYTES = 2**20
"""How much of the display may wait for a reader; what comes then is left out."""
_PATIENCE_SECONDS = 2.0
"""How long the end of a process waits for a reader of the display that takes nothing."""
_PIECE_BYTES = 4096
_NAMES = {1: "<stdout>", 2: "<stderr>"}
"""As Python names its streams: scripts ask for them."""
_DONE = "what the command has done is done; make room there, or send the output elsewhere"
_LEFT_OUT = b"\n... left out here, because it was not read in time ...\n"


def reopen_closed_streams() -> None:
    """Open each of the descriptors 0, 1 and 2 that is closed on /dev/null."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The system gives the lowest number that is free, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def protect_streams(*, is_answer: bool = True) -> None:
    """Replace `sys.stderr` by a display and `sys.stdout` by an answer, as this module says.

    Without `is_answer` stdout is a display too. A stream that is not the process's own any more,
    because somebody has redirected it within Python, stays as it is.
    """
    reopen_closed_streams()
    if sys.stderr is sys.__stderr__:
        display = _Display(2)
        sys.stderr = _text_stream(display, sys.__stderr__, errors="backslashreplace")
        atexit.register(_drain_display)
    if sys.stdout is sys.__stdout__:
        raw = _Answer(1) if is_answer else _Display(1)
        # A file name may hold bytes that are not valid UTF-8: print `?` for them.
        sys.stdout = _text_stream(raw, sys.__stdout__, errors="replace")


@contextmanager
def answer(*, hint: str = _DONE) -> Iterator[None]:
    """Have all that the block prints on stdout written when it ends.

    Raises OutputLost with `hint` where it cannot be written; a reader that has gone does not matter
    to what follows the block.
    """
    try:
        yield
        sys.stdout.flush()
    except OutputLost as lost:
        if not lost.reader_has_gone:
            raise OutputLost(lost.message, hint=hint) from None


def _text_stream(raw: io.FileIO, before: TextIO | None, *, errors: str) -> TextIO:
    """Return a text stream on `raw`, buffered as the stream before it."""
    is_unbuffered = False
    is_by_line = isinstance(raw, _Display)
    if isinstance(before, io.TextIOWrapper):
        before.flush()
        is_unbuffered, is_by_line = before.write_through, before.line_buffering
    stream = io.TextIOWrapper(
        raw if is_unbuffered else io.BufferedWriter(raw),
        encoding=getattr(before, "encoding", None) or "utf-8",
        errors=errors,
        line_buffering=is_by_line,
        write_through=is_unbuffered,
    )
    # Python sets it, too, and a script may ask for it.
    stream.mode = "w"  # type: ignore[misc]
    return stream


def _drain_display() -> None:
    buffer = getattr(sys.stderr, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    if isinstance(raw, _Display):
        sys.stderr.flush()
        raw.drain()


class _Descriptor(io.FileIO):
    """A descriptor of the process, which whoever has started it may share with other programs."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.name = _NAMES[descriptor]

    def _write_all(self, text: bytes) -> None:
        """Write all of it, also where another program has set the descriptor to O_NONBLOCK."""
        left = memoryview(text)
        while left:
            written = super().write(left)
            if written is None:
                poll = select.poll()
                poll.register(self.fileno(), select.POLLOUT)
                poll.poll()
            else:
                left = left[written:]


class _Answer(_Descriptor):
    """A descriptor whose first failure raises OutputLost; all that follows is dropped."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._is_terminal = self.isatty()  # one that has been closed is none any more
        self._is_lost = False

    def write(self, data: Any) -> int:
        text = bytes(data)
        if self._is_lost:
            return len(text)
        _drain_display()  # the progress stands above the answer, where both go to one terminal
        try:
            self._write_all(text)
        except OSError as error:
            self._is_lost = True
            is_hung_up = self._is_terminal and error.errno in (errno.EIO, errno.ENXIO)
            raise OutputLost(
                f"standard output cannot be written: {error.strerror or error}",
                hint=_DONE,
                reader_has_gone=is_hung_up or error.errno == errno.EPIPE,
            ) from None
        return len(text)


class _Display(_Descriptor):
    """A descriptor that drops what cannot be written.

    A pipe or a terminal may keep a writer waiting for ever: a thread writes there.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        mode = os.fstat(descriptor).st_mode
        self._may_block = self.isatty() or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._has_left_out = False
        self._given_up_at = 0
        """How many bytes waited when `drain` last gave up."""

    def write(self, data: Any) -> int:
        text = bytes(data)
        if not self._may_block:
            self._send(text)
            return len(text)
        with self._changed:
            if self._waiting_bytes + len(text) > _MOST_WAITING_BYTES:
                self._has_left_out = True
                return len(text)
            if self._has_left_out:
                self._has_left_out = False
                self._add(_LEFT_OUT)
            self._add(text)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="display", daemon=True)
                self._thread.start()
        return len(text)

    def drain(self) -> None:
        """Wait until all is written or dropped, or nothing was for _PATIENCE_SECONDS."""
        with self._changed:
            while left := self._waiting_bytes:
                if left == self._given_up_at:
                    return
                has_moved = self._changed.wait_for(
                    lambda before=left: self._waiting_bytes < before,  # type: ignore[misc]
                    timeout=_PATIENCE_SECONDS,
                )
                if not has_moved:
                    self._given_up_at = left
                    return

    def _add(self, text: bytes) -> None:
        for begin in range(0, len(text), _PIECE_BYTES):
            self._waiting.append(text[begin : begin + _PIECE_BYTES])
        self._waiting_bytes += len(text)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                piece = self._waiting.popleft()
            self._send(piece)
            with self._changed:
                self._waiting_bytes -= len(piece)
                self._changed.notify_all()

    def _send(self, text: bytes) -> None:
        if _would_be_stopped(self.fileno()):
            return
        try:
            self._write_all(text)
        except OSError:
            pass  # dropped; the next text may find a disk with room again


def _would_be_stopped(descriptor: int) -> bool:
    """Return whether writing stops this process: a job in the background, and `stty tostop`."""
    try:
        if os.tcgetpgrp(descriptor) == os.getpgrp():
            return False
        return bool(termios.tcgetattr(descriptor)[3] & termios.TOSTOP)
    except (OSError, termios.error):
        return False  # no terminal, or not that of this job
