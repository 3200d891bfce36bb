"""Device slots: at most one trial at a time on a device, over all searches and users of a machine.

A search that has a slot holds a lock. Its trials hold another lock until their last process has
ended. A slot is granted when both are free, so that a trial of a killed search that is still ending
is not measured together with the next one. Waiting searches queue for a third lock.

Searches with the same number of slots on a device share it. One with another number waits until all
slots are free, and meanwhile nobody who comes later gets one: a search that is to have the device
for itself (one slot) is never measured beside one that expects a neighbour, nor one with two
beside one with four.

The locks are names of abstract Unix sockets (`execution/server/socket_lock.py`): they need no
folder that another user could tamper with, the kernel releases them with their process, and it
knows who holds one. They work for all users of a network namespace. Searches in containers with
separate networks do not see each other's locks. On a GPU a slot therefore also holds `flock` on the
device node, which works wherever the same node is visible: exclusively where a single trial is
allowed, shared where several are. The node is left out where this user may not open it, where the
driver does not name it, and for a slice of a GPU (MIG), which has no node.

Every user who may use the device can hold these locks; a search that waits reports for whom.

Without abstract sockets (not Linux, or a sandbox without them) the locks are files in a folder of
the user, and searches of other users are not waited for. `AUTOTUNE_LOCK_FOLDER` names another
folder for such files, for searches that should wait for each other and for no others, as where each
has its own processor cores.
"""

import os
import re
import shutil
import socket
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

from autotune import files
from autotune.errors import StorageUnavailable
from autotune.execution.private_folder import private_folder, runtime_bases
from autotune.execution.server import socket_lock
from autotune.execution.server.child import MAX_SLOT_HOLDERS
from autotune.lock_holders import describe_process
from autotune.spec.result import DeviceInfo

LOCK_FOLDER_VARIABLE = "AUTOTUNE_LOCK_FOLDER"

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
        name = re.sub(r"[^\w-]", "-", device.uuid or device.device)[:64]
        self.name = name
        """What all searches of the machine know the device by."""
        self._locks: _Locks
        if folder is not None:
            self._locks = _FileLocks(folder, name)
        else:
            self._locks = _create_locks(device, name, note)
        self._numbers = range(places)
        self._node = node if folder is None else None
        self._awaited: list[str] = []
        """The names of the locks that this search waits for one of."""
        self.number: int | None = None
        """Which of the slots this search had last; alone, the first. None where each place has
        locks of its own, so that numbers say nothing."""

    @property
    def places(self) -> int:
        """How many trials may run at a time."""
        return len(self._numbers)

    @contextmanager
    def slot(
        self, pause: Callable[[], None], *, study: str = "", alone: bool = False
    ) -> Iterator[str]:
        """Waits for a slot, calling `pause` between two attempts, and holds it during the block.

        Searches that wait for it learn the name of the `study`. With `alone` it waits for all
        slots and holds them, so that no other trial runs at the same time. Yields the lock that the
        trials of the slot must hold, as `TrialServer.submit` takes it.
        """
        with ExitStack() as held:
            slot_names = [f"{number}.turn" for number in self._numbers]
            self._awaited = [*slot_names, "line"]
            # Waiting searches queue, so that the search that has just released a slot does not
            # acquire it again before them.
            queue = _wait_for(lambda: self._locks.acquire("line"), pause)
            held.callback(queue.release)
            self._awaited = slot_names
            numbers = []
            for _ in self._numbers if alone else range(1):
                number, slot = _wait_for(self._acquire_slot, pause)
                held.callback(slot.release)
                numbers.append(number)
                if study:
                    self._locks.name_study(f"{number}.turn", slot, study, held)
                self._awaited = [f"{one}.turn" for one in self._numbers if one not in numbers]
            while others := self._locks_of_other_numbers():
                self._awaited = others
                pause()
            for number in numbers:
                self._say_of_how_many(number, held)
            self._awaited = []
            if self._node is not None:
                self._lock_node(self._node, held, pause, shared=self.places > 1 and not alone)
            queue.release()
            for number in numbers:
                trials = self._trials(number)
                self._awaited = self._locks.trial_lock_names(trials)
                while not self._locks.trials_have_ended(trials):
                    pause()
            if self._locks.are_shared:
                self.number = 0 if alone else numbers[0]
            yield self._locks.trial_lock(self._trials(numbers[0]))

    def holder(self) -> str:
        """Returns who is waited for; empty where it is not known.

        `process 17 of user ada, which runs since 2026-01-31 14:05, for study quick-gpt`.
        """
        for name in self._awaited:
            holder = self._locks.lock_holder(name)
            if holder:
                return holder
        return ""

    def close(self) -> None:
        self._locks.close()

    def _acquire_slot(self) -> "tuple[int, _HeldLock] | None":
        for number in self._numbers:
            slot = self._locks.acquire(f"{number}.turn")
            if slot is not None:
                return number, slot
        return None

    def _trials(self, number: int) -> str:
        return f"{number}.of.{self.places}.trials"

    def _say_of_how_many(self, number: int, held: ExitStack) -> None:
        """Hold a lock whose name tells others, until `held` is closed, of how many the slot is."""
        lock = self._locks.acquire(f"{number}.of.{self.places}")
        if lock is not None:  # nobody else has the slot
            held.callback(lock.release)

    def _locks_of_other_numbers(self) -> list[str]:
        """Return the locks of searches with another number of slots, and of their trials.

        Nobody gets a slot meanwhile, as this search is at the head of the queue.
        """
        found = []
        for name in self._locks.held_names():
            slot = _SLOT_OF.match(name)
            if slot is not None and int(slot["places"]) != self.places:
                found.append(name if slot["trials"] else f"{slot['number']}.turn")
        return found

    def _lock_node(
        self, node: Path, held: ExitStack, pause: Callable[[], None], *, shared: bool
    ) -> None:
        try:
            descriptor = os.open(node, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return  # no permission, or the device is gone
        node_lock = _HeldLock(descriptor)
        held.callback(node_lock.release)
        while not files.try_acquire(descriptor, shared=shared):
            pause()


def _wait_for(acquire: Callable[[], T | None], pause: Callable[[], None]) -> T:
    while True:
        acquired = acquire()
        if acquired is not None:
            return acquired
        pause()


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


_FOR_STUDY = ".for."
"""Between the name of a lock and the study for which it is held."""
_SLOT_OF = re.compile(r"(?P<number>\d+)\.of\.(?P<places>\d+)(?P<trials>\.trials(\.\d+)?)?$")
"""The name of a lock that says of how many slots one is."""


class _HeldLock:
    """A lock held through an open descriptor, until it is released or the process has ended.

    A forked process does not hold it, because it may outlive the slot.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _all_held.append(self)

    def write(self, text: str) -> None:
        """Replaces what stands in the lock file."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode("ascii"), 0)

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
    """The locks of one device.

    `line` is the queue, `0.turn` a slot, `0.of.2` says of how many it is, and `0.of.2.trials` is
    held by its trials. The names are shared with other versions of autotune on the machine.
    """

    are_shared: bool
    """Whether other searches, and other places of this one, use the same locks."""

    def acquire(self, name: str) -> _HeldLock | None:
        """Returns the held lock; None where another process has it."""

    def held_names(self) -> list[str]:
        """Returns the names of the locks that any process holds."""

    def trials_have_ended(self, name: str) -> bool:
        """Whether the last process of the slot's earlier trials has ended."""

    def trial_lock(self, name: str) -> str:
        """Returns the lock that a trial's process must hold, as `child.py` takes it."""

    def trial_lock_names(self, name: str) -> list[str]:
        """Returns the names of the trials' locks, for `lock_holder`."""

    def name_study(self, name: str, lock: _HeldLock, study: str, held: ExitStack) -> None:
        """Lets others know the study for which the held lock is held, until `held` is closed."""

    def lock_holder(self, name: str) -> str:
        """Returns who holds the lock and for which study; empty where it is not known."""

    def close(self) -> None:
        """Removes a temporary folder of locks."""


class _SocketLocks:
    """Locks for all users of this machine's network namespace."""

    def __init__(self, device: str) -> None:
        self.are_shared = True
        self._prefix = f"autotune/{device}/"

    def acquire(self, name: str) -> _HeldLock | None:
        descriptor = socket_lock.acquire(self._prefix + name)
        return None if descriptor is None else _HeldLock(descriptor)

    def held_names(self) -> list[str]:
        # Without that list, in a sandbox, slots exclude each other by their number alone.
        return socket_lock.names_after(self._prefix)

    def trials_have_ended(self, name: str) -> bool:
        for lock_name in self.trial_lock_names(name):
            lock = self.acquire(lock_name)
            if lock is None:
                return False
            lock.release()
        return True

    def trial_lock(self, name: str) -> str:
        return f"@{self._prefix}{name}"

    def trial_lock_names(self, name: str) -> list[str]:
        return [f"{name}.{number}" for number in range(MAX_SLOT_HOLDERS)]

    def name_study(self, name: str, lock: _HeldLock, study: str, held: ExitStack) -> None:
        # A second socket, whose own name has that of the study: all users can list the names.
        label = f"{self._prefix}{name}{_FOR_STUDY}{study}"
        descriptor = socket_lock.acquire(label[: socket_lock.LONGEST_NAME])
        if descriptor is not None:
            held.callback(_HeldLock(descriptor).release)

    def lock_holder(self, name: str) -> str:
        holder = socket_lock.lock_holder(self._prefix + name)
        before_study = f"{self._prefix}{name}{_FOR_STUDY}"
        studies = socket_lock.names_after(before_study)
        if not holder or not studies:
            return holder
        study = studies[0]
        if len(before_study) + len(study) == socket_lock.LONGEST_NAME:  # it may be cut
            study += "..."
        return f"{holder}, for study {study}"

    def close(self) -> None:
        pass


class _FileLocks:
    """Locks for all searches that use the same folder; a temporary one is used by one search."""

    def __init__(self, folder: Path, device: str, *, is_temporary: bool = False) -> None:
        self._folder = folder
        self._device = device
        self.are_shared = not is_temporary

    def acquire(self, name: str) -> _HeldLock | None:
        descriptor = self._open(name)
        if files.try_acquire(descriptor):
            os.ftruncate(descriptor, 0)  # what an earlier holder has written
            return _HeldLock(descriptor)
        os.close(descriptor)
        return None

    def held_names(self) -> list[str]:
        before = f"{self._device}-"
        names = [file.name.removeprefix(before) for file in self._folder.glob(f"{before}*")]
        return [name for name in names if not files.is_free(self._file(name))]

    def trials_have_ended(self, name: str) -> bool:
        lock = self.acquire(name)
        if lock is None:
            return False
        lock.release()
        return True

    def trial_lock(self, name: str) -> str:
        return str(self._file(name).absolute())

    def trial_lock_names(self, name: str) -> list[str]:
        return [name]

    def name_study(self, name: str, lock: _HeldLock, study: str, held: ExitStack) -> None:
        lock.write(f"{os.getpid()} {os.getuid()} {study}")

    def lock_holder(self, name: str) -> str:
        try:
            pid, user, study = self._file(name).read_text(encoding="ascii").split()
            return f"{describe_process(int(pid), int(user))}, for study {study}"
        except (OSError, ValueError):
            return ""  # no process has said so

    def close(self) -> None:
        if not self.are_shared:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _open(self, name: str) -> int:
        file = self._file(name)
        try:
            return files.open_lock_file(file, mode=0o600)
        except OSError as error:
            raise _unusable_error(file, error) from None

    def _file(self, name: str) -> Path:
        return self._folder / f"{self._device}-{name}"


def _create_locks(device: DeviceInfo, name: str, note: Callable[[str], None]) -> _Locks:
    """Returns the locks of all users, or, without abstract sockets, this user's, with a note."""
    reason = _abstract_socket_error()
    if not reason:
        return _SocketLocks(name)
    host = re.sub(r"[^\w-]", "-", socket.gethostname())[:64]  # machines may share a home
    folder = private_folder(
        f"locks-{host}", purpose="the folder of device locks", bases=runtime_bases()
    )
    who = "other users, and others of yours," if folder.is_temporary else "other users"
    sentence = (
        f"searches of {who} do not wait for this one on {device.device}: "
        f"there are no abstract Unix sockets ({reason})"
    )
    if folder.note:
        sentence += f", and {folder.note}"
    note(sentence)
    return _FileLocks(folder.path, name, is_temporary=folder.is_temporary)


def _abstract_socket_error() -> str:
    """Returns why there are no abstract Unix sockets; empty where there are."""
    try:
        descriptor = socket_lock.acquire(f"autotune/{uuid.uuid4().hex}")
    except OSError as error:
        return error.strerror or str(error)
    if descriptor is not None:
        os.close(descriptor)
    return ""


def _make_folder(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable_error(folder, error) from None
    return folder


def _unusable_error(path: Path, error: OSError) -> StorageUnavailable:
    return StorageUnavailable(
        f"the locks of device slots cannot be stored in {path}: {error.strerror or error}",
        hint=f"let {LOCK_FOLDER_VARIABLE} name a folder that can be written to, or unset it",
    )
