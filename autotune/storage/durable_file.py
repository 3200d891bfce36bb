"""Files that are whole or not there: written beside their place, synced, and then put there in one step."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def durable_file(file: Path) -> Iterator[Path]:
    """The file to write, in the same folder; when the block ends it takes the place of `file`.

    Raises OSError.

    Where the block raises, nothing is left of it.
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
