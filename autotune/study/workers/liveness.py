"""Who a worker is, and whether another one still lives.

A worker holds a lock on a file of its own for as long as its process lives; the kernel lets go of
it however the process ends. On the same machine that tells the dead from the slow at once; of a
worker elsewhere only its lease does.

The names of other workers come from the database, which others may write to: one that is not like
ours names no file.
"""

import fcntl
import os
import re
import socket
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_ROOM_BYTES = 2**16
"""Kept on disk for one result, where the disk fills up while it is measured."""


_NAME = re.compile(r".*:[0-9]+:(?P<id>[0-9a-f]{12})", re.ASCII | re.DOTALL)
"""`host:17:0123456789ab`; the last part names the worker's lock file, and nothing else is to become
part of a path."""


class WorkerIdentity:
    """This worker's name, and its lock in `folder`, held from `__init__` to `close` or the process's end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.name = f"{_host()}:{os.getpid()}:{uuid.uuid4().hex[:12]}"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"{self.name.rpartition(':')[2]}.lock"
        self._lock = new_lock(self._file)
        with suppress(OSError):
            os.pwrite(self._lock, bytes(_ROOM_BYTES), 0)

    def close(self, *, leaves_attempts: bool = False) -> None:
        """`leaves_attempts`: others are to see that it is dead, and give up what it could not."""
        self.free_room()
        os.close(self._lock)
        if not leaves_attempts:
            self._file.unlink(missing_ok=True)

    def free_room(self) -> None:
        """Gives the room that was kept for a result to whoever writes next."""
        with suppress(OSError):
            os.ftruncate(self._lock, 0)

    def is_dead(self, worker: str) -> bool:
        """Whether that worker ran on this machine and has ended."""
        return worker != self.name and is_dead(self._folder, worker)

    def forget(self, worker: str) -> None:
        """Removes the lock file of a dead worker, once nothing of its is left."""
        file = _lock_file(self._folder, worker)
        if file is not None:
            file.unlink(missing_ok=True)

    def dead(self) -> set[Path]:
        """Lock files of the workers of this machine that have ended without a word."""
        return {
            file for file in self._folder.glob("*.lock") if file != self._file and is_free(file)
        }

    def sweep(self, dead: set[Path], *, but: Iterable[str]) -> None:
        """Removes these lock files, `but` not those of workers that something is left of."""
        for file in dead - {_lock_file(self._folder, worker) for worker in but}:
            file.unlink(missing_ok=True)


def new_lock(file: Path) -> int:
    """A lock file that nobody ever sees free, until the descriptor is closed or the process has ended."""
    unlocked = file.with_name(f".{uuid.uuid4().hex}")
    descriptor = os.open(unlocked, os.O_CREAT | os.O_RDWR, 0o644)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unlocked.rename(file)
    return descriptor


def is_free(file: Path) -> bool:
    """Whether no living process holds the lock. A file that is gone is no longer anybody's."""
    try:
        descriptor = os.open(file, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def is_dead(folder: Path, worker: str) -> bool:
    """Whether a worker of another process ran on this machine and has ended.

    Of other machines nothing is said: not every file system that they share has locks that reach
    from one to another. Nor of a name that is not like a worker's: only its lease says whether it
    still lives.
    """
    file = _lock_file(folder, worker)
    return file is not None and worker.startswith(f"{_host()}:") and file.exists() and is_free(file)


def _host() -> str:
    return socket.gethostname()[:80]


def _lock_file(folder: Path, worker: str) -> Path | None:
    """None for what is no worker's name."""
    name = _NAME.fullmatch(worker)
    return None if name is None else folder / f"{name['id']}.lock"
