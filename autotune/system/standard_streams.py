"""Standard output and error of a process whose work matters more than what it shows.

`protect_streams` replaces `sys.stdout` and `sys.stderr`:

- The *display*, stderr, drops what cannot be written: its disk is full, its reader has gone, its
  terminal was closed. A search goes on.
- The *answer*, stdout, is never dropped unsaid: what cannot be written raises OutputLost.

A standard stream that was closed is opened on /dev/null, so that no file of ours gets its number:
a traceback would otherwise be written into a database.
"""

import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from autotune.errors import OutputLost

_NAMES = {1: "<stdout>", 2: "<stderr>"}
"""As Python names its streams: scripts ask for them."""
_DONE = "what the command has done is done; make room there, or send the output elsewhere"


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
        sys.stderr = _text_stream(_Display(2), sys.__stderr__, errors="backslashreplace")
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


def _text_stream(raw: "_Descriptor", before: TextIO | None, *, errors: str) -> TextIO:
    """Returns a text stream on `raw`, buffered as the stream before it."""
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
        try:
            if not self._is_lost:
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
    """A descriptor that drops what cannot be written."""

    def write(self, data: Any) -> int:
        text = bytes(data)
        try:
            self._write_all(text)
        except OSError:
            pass  # dropped; the next text may find a disk with room again
        return len(text)
