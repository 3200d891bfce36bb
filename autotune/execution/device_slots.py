"""Device slots: at most one trial at a time on a device, over all searches and users of a machine.

A search that has a slot holds a lock, and its trials hold another one until their last process has
ended. A slot is free when nobody holds either, so that a trial of a killed search that is still
ending is not measured together with the next one. Who looks for a free slot holds the lock `line`
meanwhile: so only one looks at a time, and who waits is not overtaken.

Searches with the same number of slots on a device share it. Whoever measures alone, as with one
slot, waits until nothing is held on the device, and so does a search with another number of slots.

The locks are names of abstract Unix sockets (`execution/server/socket_lock.py`): they need no
folder that another user could tamper with, the kernel releases them with their process, lists all
that are held, and knows who holds one. They work for all users of a network namespace. Searches in
containers with separate networks do not see each other's locks. On a GPU a slot therefore also
holds `flock` on the device node, which works wherever the same node is visible: exclusively where a
single trial is allowed, shared where several are. The node is left out where this user may not open
it, where the driver does not name it, and for a slice of a GPU (MIG), which has no node.

Every user who may use the device can hold these locks; a search that waits reports for whom.

Without abstract sockets (not Linux, or a sandbox without them) the locks are files in a folder of
the user, and searches of other users are not waited for. `AUTOTUNE_LOCK_FOLDER` names another
folder for such files, for searches that should wait for each other and for no others, as where each
has its own processor cores.
"""

import os
import re
import socket
import stat
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

from autotune.errors import StorageUnavailable
from autotune.execution.flow import POLL_SECONDS, Flow, Pause, result_of
from autotune.execution.private_folder import safe_cache_folder
from autotune.execution.server import socket_lock
from autotune.spec.result import DeviceInfo
from autotune.system import files
from autotune.system.lock_holders import holder_of

LOCK_FOLDER_VARIABLE = "AUTOTUNE_LOCK_FOLDER"

# The names of locks, shared with other versions of autotune on the machine; `0.of.2` is the first
# of two slots.
_LINE = "line"
_ALONE = "0.turn"
_TRIALS = ".trials"
_ALONE_TRIALS = f"0.of.1{_TRIALS}"

T = TypeVar("T")


class DeviceSlots:
    """The slots of one device, for `places` trials at a time.

    With `folder`, lock files in it replace the locks that all users share. `node` is the device's
    node (`device_node`), which is locked too, but not with lock files. `note` is called with a
    sentence where other users are not waited for. Raises StorageUnavailable for a folder that
    cannot be used.
    """

    def __init__(
        self,
        device: DeviceInfo,
        *,
        places: int = 1,
        folder: Path | None = None,
        node: Path | None = None,
        note: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        named = os.environ.get(LOCK_FOLDER_VARIABLE)
        if folder is None and named:
            folder = _make_folder(Path(named))
        self.name = re.sub(r"[^\w-]", "-", device.uuid or device.device)[:64]
        """What all searches of the machine know the device by."""
        self.places = places
        """How many trials may run at a time."""
        self._locks: _Locks
        if folder is not None:
            self._locks = _FileLocks(folder, self.name)
        else:
            self._locks = _create_locks(device, self.name, note)
        self._node = node if folder is None else None
        self._awaited: list[str] = []
        """The names of the locks that this search waits for one of."""
        self.number = 0
        """Which of the slots this search had last; alone, the first."""

    @contextmanager
    def slot(self, pause: Callable[[], None], *, alone: bool = False) -> Iterator[str]:
        """Waits for a slot, calling `pause` between two attempts, and holds it during the block.

        Yields what `take` returns.
        """
        with ExitStack() as held:
            yield result_of(self.take(held, pause, alone=alone))

    def take(self, held: ExitStack, each: Callable[[], None], *, alone: bool = False) -> Flow[str]:
        """Waits for a slot, calling `each` between two attempts; it is given back with `held`.

        With `alone` no other trial runs at the same time. Returns the lock that the trials of the
        slot must hold, as `TrialServer.submit` takes it.
        """
        is_alone = alone or self.places == 1
        slots = [_ALONE] if is_alone else [f"{n}.of.{self.places}" for n in range(self.places)]
        with ExitStack() as in_line:
            self._awaited = [*self._locks.held_names(), _LINE]
            line = yield from _until(lambda: self._locks.acquire(_LINE), each)
            in_line.callback(line.release)
            slot, lock = yield from _until(lambda: self._acquire_free(slots), each)
            held.callback(lock.release)
            self._awaited = []
            if self._node is not None:
                yield from self._lock_node(self._node, held, each, shared=not is_alone)
        self.number = slots.index(slot)
        return self._locks.trial_lock(_ALONE_TRIALS if is_alone else f"{slot}{_TRIALS}")

    def holder(self) -> str:
        """Returns who is waited for; empty where it is not known.

        `process 17 of user ada, which runs since 2026-01-31 14:05`.
        """
        holders = (self._locks.lock_holder(name) for name in self._awaited)
        return next((holder for holder in holders if holder), "")

    def _acquire_free(self, slots: Sequence[str]) -> "tuple[str, _HeldLock] | None":
        """Acquires one of these slots; returns None while all, or any others, are in use.

        A slot is in use while its lock is held, or that of its trials.
        """
        self._awaited = self._locks.held_names()
        in_use = {name.partition(_TRIALS)[0] for name in self._awaited}
        if in_use <= set(slots):
            for slot in slots:
                lock = None if slot in in_use else self._locks.acquire(slot)
                if lock is not None:
                    return slot, lock
        return None

    def _lock_node(
        self, node: Path, held: ExitStack, each: Callable[[], None], *, shared: bool
    ) -> Flow[None]:
        try:
            descriptor = os.open(node, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return  # no permission, or the device is gone
        node_lock = _HeldLock(descriptor)
        held.callback(node_lock.release)
        yield from _until(lambda: files.try_acquire(descriptor, shared=shared) or None, each)


def _until(acquire: Callable[[], T | None], each: Callable[[], None]) -> Flow[T]:
    """Returns what `acquire` returns as soon as that is not None."""
    while (acquired := acquire()) is None:
        each()
        yield Pause(POLL_SECONDS)
    return acquired


def waiting_message(device: str, holder: str) -> str:
    """Returns the sentence, without its full stop, that says who has the device.

    `holder` is from `DeviceSlots.holder`: empty where it is not known.
    """
    sentence = f"waiting for {device}, which another trial is using"
    return f"{sentence} ({holder})" if holder else sentence


def device_node(device: DeviceInfo) -> Path | None:
    """Returns `/dev/nvidiaN` of a GPU by its UUID: N is neither CUDA's index nor NVML's.

    None where there is no such node, and for a GPU that is partitioned into slices (MIG), because
    two slices are two devices with one node.
    """
    if device.uuid is None or device.uuid.startswith("MIG-"):
        return None
    # A tenth of a second, which only searches on a GPU need.
    import pynvml  # noqa: PLC0415

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(device.uuid)
        minor = pynvml.nvmlDeviceGetMinorNumber(handle)
        with suppress(pynvml.NVMLError):  # most GPUs do not support slices
            if pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE:
                return None
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    return _verify_node(Path(f"/dev/nvidia{minor}"), minor)


def describe_slot_scope(device: DeviceInfo) -> str:
    """Returns a sentence that says which searches wait for each other on the device."""
    folder = os.environ.get(LOCK_FOLDER_VARIABLE)
    if folder:
        return f"searches whose {LOCK_FOLDER_VARIABLE} is {folder}, and no others"
    reason = _abstract_socket_error()
    if reason:
        return (
            "this user's searches; others are not waited for, "
            f"as there are no abstract Unix sockets ({reason})"
        )
    node = device_node(device)
    if node is not None and os.access(node, os.R_OK):
        return f"all searches of this machine, and by {node} those of its containers"
    return f"all searches of this machine; {_NOT_BEYOND_CONTAINERS}"


_NOT_BEYOND_CONTAINERS = "those in a container with its own network are not waited for"


def container_isolation_note(device: DeviceInfo) -> str:
    """Returns why a search on a GPU does not wait for other containers; empty where it does."""
    if device.type != "cuda" or os.environ.get(LOCK_FOLDER_VARIABLE):
        return ""
    node = device_node(device)
    if node is not None and os.access(node, os.R_OK):
        return ""
    reason = f"{node} may not be opened" if node is not None else "it has no device node"
    return f"of the searches on {device.device} {_NOT_BEYOND_CONTAINERS}: {reason}"


def _verify_node(node: Path, minor: int) -> Path | None:
    """Returns `node` where it is the character device with that minor number; else None."""
    try:
        status = node.lstat()
    except OSError:
        return None
    if stat.S_ISCHR(status.st_mode) and os.minor(status.st_rdev) == minor:
        return node
    return None


# -- the locks -------------------------------------------------------------------------------------


class _HeldLock:
    """A lock held through an open descriptor, until it is released or the process has ended.

    A forked process does not hold it, because it may outlive the slot.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _all_held.append(self)

    def release(self) -> None:
        """Releases the lock; does nothing the second time, and in a forked process."""
        if self not in _all_held:
            return
        _all_held.remove(self)
        os.close(self._descriptor)

    def close_in_fork(self) -> None:
        os.close(self._descriptor)


_all_held: list[_HeldLock] = []


def _close_in_fork() -> None:
    for lock in _all_held:
        lock.close_in_fork()
    _all_held.clear()


os.register_at_fork(after_in_child=_close_in_fork)


class _Locks(Protocol):
    """The locks of one device."""

    def acquire(self, name: str) -> _HeldLock | None:
        """Returns the held lock; None where another process has it."""

    def held_names(self) -> list[str]:
        """Returns the names of the locks but `line` that any process holds."""

    def trial_lock(self, name: str) -> str:
        """Returns the lock that a trial's process must hold, as `process/request.py` takes it."""

    def lock_holder(self, name: str) -> str:
        """Returns who holds the lock; empty where it is not known."""


class _SocketLocks:
    """Locks for all users of this machine's network namespace."""

    def __init__(self, device: str) -> None:
        self._prefix = f"autotune/{device}/"

    def acquire(self, name: str) -> _HeldLock | None:
        descriptor = socket_lock.acquire(self._prefix + name)
        return None if descriptor is None else _HeldLock(descriptor)

    def held_names(self) -> list[str]:
        return [name for name in socket_lock.names_after(self._prefix) if name != _LINE]

    def trial_lock(self, name: str) -> str:
        return f"@{self._prefix}{name}"

    def lock_holder(self, name: str) -> str:
        return socket_lock.lock_holder(self._prefix + name)


class _FileLocks:
    """Locks for all searches that use the same folder."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder = folder
        self._prefix = f"{device}."

    def acquire(self, name: str) -> _HeldLock | None:
        descriptor = self._open(name)
        if files.try_acquire(descriptor):
            return _HeldLock(descriptor)
        os.close(descriptor)
        return None

    def held_names(self) -> list[str]:
        names = [
            file.name.removeprefix(self._prefix) for file in self._folder.glob(f"{self._prefix}*")
        ]
        return [name for name in names if name != _LINE and not files.is_free(self._file(name))]

    def trial_lock(self, name: str) -> str:
        os.close(self._open(name))
        return str(self._file(name).absolute())

    def lock_holder(self, name: str) -> str:
        return holder_of([self._file(name)])

    def _open(self, name: str) -> int:
        file = self._file(name)
        try:
            return files.open_lock_file(file, mode=0o600)
        except OSError as error:
            raise _unusable_error(file, error) from None

    def _file(self, name: str) -> Path:
        return self._folder / f"{self._prefix}{name}"


def _create_locks(device: DeviceInfo, name: str, note: Callable[[str], None]) -> _Locks:
    """Returns the locks of all users, or, without abstract sockets, this user's, with a note."""
    reason = _abstract_socket_error()
    if not reason:
        return _SocketLocks(name)
    host = re.sub(r"[^\w-]", "-", socket.gethostname())[:64]  # machines may share a home
    try:
        folder = safe_cache_folder(f"locks-{host}")
    except OSError as error:
        raise _unusable_error("the user's cache folder", error) from None
    note(
        f"searches of other users do not wait for this one on {device.device}: "
        f"there are no abstract Unix sockets ({reason})"
    )
    return _FileLocks(folder, name)


def _abstract_socket_error() -> str:
    """Returns why abstract Unix sockets cannot be used as locks; empty where they can."""
    name = f"autotune/{uuid.uuid4().hex}"
    try:
        descriptor = socket_lock.acquire(name)
    except OSError as error:
        return error.strerror or str(error)
    if descriptor is None:
        return ""
    is_listed = bool(socket_lock.names_after(name))
    os.close(descriptor)
    return "" if is_listed else "the system does not list them"


def _make_folder(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable_error(folder, error) from None
    return folder


def _unusable_error(where: Path | str, error: OSError) -> StorageUnavailable:
    return StorageUnavailable(
        f"the locks of device slots cannot be stored in {where}: {error.strerror or error}",
        hint=f"let {LOCK_FOLDER_VARIABLE} name a folder that you can write to, or unset it",
    )
