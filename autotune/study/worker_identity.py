"""Who a worker is, and whether another one still lives.

A worker holds a lock on a file of its own for as long as its process lives; the kernel lets go of it however the
process ends. On the same machine that tells the dead from the slow at once; of a worker elsewhere only its lease does.
"""

import os
import socket
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import filelock

_ROOM_BYTES = 2**16
"""Kept on disk for one result, where the disk fills up while it is measured."""


class WorkerIdentity:
    """This worker's name, and its lock in `folder`, held from `__init__` to `close` or the process's end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.name = f"{socket.gethostname()[:80]}:{os.getpid()}:{uuid.uuid4().hex[:12]}"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = _lock_file(folder, self.name)
        self._lock = filelock.FileLock(self._file)
        self._lock.acquire(timeout=5)  # another worker may be sweeping
        with suppress(OSError):
            self._file.write_bytes(bytes(_ROOM_BYTES))

    def close(self, *, leaves_attempts: bool = False) -> None:
        """`leaves_attempts`: others are to see that it is dead, and give up what it could not."""
        self.free_room()
        self._lock.release()
        if not leaves_attempts:
            self._file.unlink(missing_ok=True)

    def free_room(self) -> None:
        """Gives the room that was kept for a result to whoever writes next."""
        with suppress(OSError):
            os.truncate(self._file, 0)

    def is_dead(self, worker: str) -> bool:
        """Whether that worker ran on this machine and has ended."""
        return worker != self.name and is_dead(self._folder, worker)

    def forget(self, worker: str) -> None:
        """Removes the lock file of a dead worker, once nothing of its is left."""
        _lock_file(self._folder, worker).unlink(missing_ok=True)

    def dead(self) -> set[Path]:
        """Lock files of the workers of this machine that have ended without a word."""
        return {file for file in self._folder.glob("*.lock") if file != self._file and _is_free(file)}

    def sweep(self, dead: set[Path], *, but: Iterable[str]) -> None:
        """Removes these lock files, `but` not those of workers that something is left of."""
        for file in dead - {_lock_file(self._folder, worker) for worker in but}:
            file.unlink(missing_ok=True)


def _is_free(file: Path) -> bool:
    lock = filelock.FileLock(file)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return False
    lock.release()
    return True


def is_dead(folder: Path, worker: str) -> bool:
    """Whether a worker of another process ran on this machine and has ended."""
    file = _lock_file(folder, worker)
    return file.exists() and _is_free(file)


def _lock_file(folder: Path, worker: str) -> Path:
    return folder / f"{worker.rpartition(':')[2]}.lock"
