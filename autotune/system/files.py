"""Reads and writes files that several processes share, and locks them.

A lock is one of `flock`: the kernel releases it with the last copy of its descriptor, however the
process ends, so that no lock outlives a killed process. The locks of devices that need no file are
`execution/server/socket_lock.py`.
"""

import errno
import fcntl
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# -- reading ---------------------------------------------------------------------------------------


def read_plain_file(file: Path, *, most_bytes: int) -> bytes:
    """Returns the content of a file that other processes have left in a folder.

    Raises OSError, also where it is a link, no regular file (a pipe would block), or larger than
    `most_bytes`.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(file, flags), "rb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(file))
        content = opened.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, "is too large", str(file))
    return content


# -- writing ---------------------------------------------------------------------------------------


@contextmanager
def durable_file(file: Path, *, unfinished: Path | None = None) -> Iterator[Path]:
    """Yields a temporary file to write; when the block ends it replaces `file`, synced to disk.

    `unfinished` is that temporary file, in the same folder, where others look for it; otherwise it
    has a random name. Where the block raises, it is removed and `file` is unchanged. Raises
    OSError.
    """
    if unfinished is None:
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


# -- locking ---------------------------------------------------------------------------------------


def acquire(descriptor: int, *, shared: bool = False) -> None:
    """Locks an open file, and waits while others hold it; `shared` locks exclude exclusive ones."""
    fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def try_acquire(descriptor: int, *, shared: bool = False) -> bool:
    """Locks an open file if no other process holds it; returns whether it did."""
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # some network file systems say EACCES
        return False
    return True


def open_lock_file(file: Path, *, mode: int) -> int:
    """Opens a file to lock, which is created where it does not exist; returns its descriptor.

    Raises OSError, also where `file` is a link, through which another user could have files
    created elsewhere.
    """
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)


def create_locked(file: Path) -> int:
    """Creates a lock file, locked from the moment it appears; returns its descriptor.

    The lock is held until the descriptor is closed or the process has ended.
    """
    unlocked = file.with_name(f".{uuid.uuid4().hex}")
    descriptor = open_lock_file(unlocked, mode=0o644)
    acquire(descriptor)
    unlocked.rename(file)
    return descriptor


def is_free(file: Path) -> bool:
    """Whether no living process holds the lock; also where the file does not exist.

    A link is no lock file, and is never free: what it leads to belongs to nobody here.
    """
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise
    try:
        return try_acquire(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def hold_lock(file: Path, pause: Callable[[], None]) -> Iterator[None]:
    """Holds the lock of `file` during the block; calls `pause` between two attempts to get it.

    The file stays: others may be waiting for the lock of this very one.
    """
    descriptor = open_lock_file(file, mode=0o666)
    try:
        while not try_acquire(descriptor):
            pause()
        yield
    finally:
        os.close(descriptor)
