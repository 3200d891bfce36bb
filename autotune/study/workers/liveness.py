"""Names this worker, and finds out whether another worker is dead, or no longer renews a lease.

Each worker locks its own file for as long as its process lives; the kernel releases the lock
however the process ends. On the same machine this tells a dead worker from a slow one at once; a
worker on another machine is known by its lease only.

The names of other workers come from the database, which other programs may write to: a name of
another format is never used as part of a path.
"""

import os
import re
import socket
import uuid
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from autotune.spec.attempt import LEASE_SECONDS, RENEWAL_SECONDS
from autotune.system.files import create_locked, is_free

_RESERVED_BYTES = 2**16
"""Reserved on disk for one result, in case the disk fills up during the trial."""


_NAME = re.compile(r".*:[0-9]+:(?P<id>[0-9a-f]{12})", re.ASCII | re.DOTALL)
"""`host:17:0123456789ab`: host, process and id. Only the id becomes part of a path."""


class WorkerIdentity:
    """This worker's name, and its lock in `folder`, held until `close` or the process's end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.name = f"{_host()}:{os.getpid()}:{uuid.uuid4().hex[:12]}"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"{self.name.rpartition(':')[2]}.lock"
        self._lock = create_locked(self._file)
        with suppress(OSError):
            os.pwrite(self._lock, bytes(_RESERVED_BYTES), 0)

    def close(self, *, leaves_attempts: bool = False) -> None:
        """Releases the lock and removes its file.

        With `leaves_attempts` the file stays, so that other workers see that this one is dead and
        end the attempts that it could not end.
        """
        self.release_reserve()
        os.close(self._lock)
        if not leaves_attempts:
            self._file.unlink(missing_ok=True)

    def release_reserve(self) -> None:
        """Frees the disk space that was reserved for a result."""
        with suppress(OSError):
            os.ftruncate(self._lock, 0)

    def is_dead(self, worker: str) -> bool:
        """Whether that worker ran on this machine and has ended."""
        return worker != self.name and is_dead(self._folder, worker)

    def forget(self, worker: str) -> None:
        """Removes the lock file of a dead worker that has no attempts left."""
        file = _lock_file(self._folder, worker)
        if file is not None:
            file.unlink(missing_ok=True)

    def dead(self) -> set[Path]:
        """Returns the lock files of workers of this machine that ended without removing theirs."""
        return {
            file for file in self._folder.glob("*.lock") if file != self._file and is_free(file)
        }

    def sweep(self, dead: set[Path], *, but: Iterable[str]) -> None:
        """Removes the lock files `dead`, except those of the workers `but`."""
        needed = {_lock_file(self._folder, worker) for worker in but}
        for file in dead - needed:
            file.unlink(missing_ok=True)


class LeaseWatch:
    """How long others have not renewed their leases, as far as this process could see.

    A lease is over by the database's clock and by this process's monotonic `clock`. Thus a clock
    that is set forward ends no lease that is still renewed, and one that is set back keeps no dead
    lease alive for ever. Of the time between two looks at most that between two renewals counts:
    the database may have been away, so that nobody could renew a lease.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        lease_seconds: float = LEASE_SECONDS,
        renewal_seconds: float = RENEWAL_SECONDS,
    ) -> None:
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._renewal_seconds = renewal_seconds
        self._looked_at = clock()
        self._seen: dict[Hashable, tuple[float, float]] = {}
        """By holder: its renewal, and for how many seconds there was no other one."""

    def overdue(self, held: Mapping[Hashable, tuple[float, bool]]) -> set[Hashable]:
        """Returns the holders whose leases are over.

        `held` has all of them: {holder: (what each renewal changes, whether it has expired)}.
        """
        now = self._clock()
        passed = min(now - self._looked_at, self._renewal_seconds)
        seen, self._seen, self._looked_at = self._seen, {}, now
        overdue = set()
        for holder, (renewal, is_expired) in held.items():
            before, seconds = seen.get(holder, (None, 0.0))
            seconds = seconds + passed if before == renewal else 0.0
            self._seen[holder] = renewal, seconds
            # The database's clock was set back where a lease that nobody renews does not expire.
            if seconds >= self._lease_seconds * (0.5 if is_expired else 2.0):
                overdue.add(holder)
        return overdue


def is_dead(folder: Path, worker: str) -> bool:
    """Whether a worker, not of this process, ran on this machine and has ended.

    False for a worker of another machine, because not every shared file system supports locks
    between machines, and for a name of another format: those are known by their lease only.
    """
    file = _lock_file(folder, worker)
    if file is None or not worker.startswith(f"{_host()}:"):
        return False
    return file.exists() and is_free(file)


def _host() -> str:
    return socket.gethostname()[:80]


def _lock_file(folder: Path, worker: str) -> Path | None:
    """Returns the lock file of a worker; None for a name of another format."""
    name = _NAME.fullmatch(worker)
    if name is None:
        return None
    return folder / f"{name['id']}.lock"
