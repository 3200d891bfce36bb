"""Writes files atomically: to a temporary file next to the target, synced, and then renamed."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def durable_file(file: Path) -> Iterator[Path]:
    """Yields a temporary file to write; when the block ends it replaces `file`.

    Where the block raises, the temporary file is removed and `file` is unchanged. Raises OSError.
    """
    unfinished = file.with_name(f".{file.name[:100]}.{uuid.uuid4().hex}")
    try:
        yield unfinished
        _sync(unfinished)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
    _sync(file.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
