"""One trial at a time on a device, over all searches of all users of this machine.

Whoever has the turn holds a lock. The trials hold another one until the last of their processes is
gone: a turn begins when both are free, so that the trial of a killed search, still ending, is not
measured together with the next one. Who waits stands in line, for which there is a third lock.

The locks are names of abstract Unix sockets (`execution/server/socket_lock.py`): they need no
folder that one user could prepare for another, the kernel frees them with their process, and it
says who holds one. They reach over all users of a network namespace. Searches in two containers
with networks of their own do not see each other's. On a GPU a turn therefore also holds `flock` on
the device's node, which reaches wherever the same node is seen: one that allows a single trial
holds it alone, those that allow several share it. A node that this user may not open, that the
driver does not name, or a slice of a GPU (MIG), which has no node of its own, is left out.

Every user can hold these locks, as every user who may use the device can use it; whom one waits for
is said.

Without abstract sockets (no Linux, or a sandbox without them) the locks are files in a folder of
the user's own, and searches of other users are not waited for. `AUTOTUNE_LOCK_FOLDER` names a
folder of such files instead, for searches that are to wait for each other and for nobody else, as
where each has processor cores of its own.
"""

import fcntl
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

from autotune.errors import StorageUnavailable
from autotune.execution.private_folder import private_folder, runtime_bases
from autotune.execution.server import socket_lock
from autotune.execution.server.child import HOLDERS_OF_A_TURN
from autotune.spec.result import DeviceInfo

LOCK_FOLDER_VARIABLE = "AUTOTUNE_LOCK_FOLDER"

_Taken = TypeVar("_Taken")


class DeviceSlots:
    """Turns on one device, of `places` trials at a time.

    `folder` is for lock files in the place of the locks that all users share. `node` is the
    device's, to be held too (`device_node`); with lock files it is not. `note` takes a sentence
    where other users are not waited for. Raises StorageUnavailable for a folder that cannot be
    used.
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
            folder = _made(Path(named))
        name = re.sub(r"[^\w-]", "-", device.uuid or device.device)[:64]
        self._locks: _Locks
        if folder is not None:
            self._locks = _FileLocks(folder, name)
        else:
            self._locks = _locks_of_all_users(device, name, note)
        self._places = range(places)
        self._node = None if folder is not None else node
        self._awaited: list[str] = []
        """The locks one of which is waited for; of the first that is held, the holder is told."""

    @property
    def places(self) -> int:
        """How many trials may run at a time."""
        return len(self._places)

    @contextmanager
    def slot(self, pause: Callable[[], None]) -> Iterator[str]:
        """Waits for a place, calling `pause` between two looks, and holds it.

        The value says what the place's trials hold (`execution/server/client.py`).
        """
        with ExitStack() as held:
            slots = [f"{place}.turn" for place in self._places]
            self._awaited = [*slots, "line"]
            # Who waits stands in line: the one that has just ended does not take every turn.
            line = _wait_for(lambda: self._locks.take("line"), pause)
            held.callback(line.release)
            self._awaited = slots
            place, slot = _wait_for(self._take_place, pause)
            held.callback(slot.release)
            self._awaited = []
            if self._node is not None:
                self._hold_node(self._node, held, pause)
            line.release()
            trials = f"{place}.trials"
            self._awaited = self._locks.held_by_trials(trials)
            while not self._locks.is_free_of_trials(trials):
                pause()
            yield self._locks.for_trials(trials)

    def holder(self) -> str:
        """Who is waited for, as `process 17 of user ada`; empty where that is not known."""
        return next(filter(None, map(self._locks.holder_of, self._awaited)), "")

    def close(self) -> None:
        self._locks.close()

    def _take_place(self) -> "tuple[int, _Held] | None":
        for place in self._places:
            slot = self._locks.take(f"{place}.turn")
            if slot is not None:
                return place, slot
        return None

    def _hold_node(self, node: Path, held: ExitStack, pause: Callable[[], None]) -> None:
        try:
            descriptor = os.open(node, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return  # no permission, or the device is gone
        node_lock = _Held(descriptor)
        held.callback(node_lock.release)
        alone = len(self._places) == 1
        while not _flock(descriptor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH):
            pause()


def _wait_for(take: Callable[[], _Taken | None], pause: Callable[[], None]) -> _Taken:
    while (taken := take()) is None:
        pause()
    return taken


def waiting_words(device: str, holder: str) -> str:
    """Returns the sentence, without its point, that says for whom a turn is waited for.

    `holder` is as from `DeviceSlots.holder`: empty where nobody knows who has the turn.
    """
    return f"waiting for {device}, where another trial has its turn" + (
        f" ({holder})" if holder else ""
    )


def device_node(device: DeviceInfo) -> Path | None:
    """`/dev/nvidiaN` of the GPU, by its UUID: N is neither CUDA's index nor NVML's.

    None where there is none.

    Nor is there one for a GPU that is cut into slices (MIG): two slices are two devices with one
    node.
    """
    if device.uuid is None or device.uuid.startswith("MIG-"):
        return None
    import pynvml  # not for a CPU's search

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(device.uuid)
        minor = pynvml.nvmlDeviceGetMinorNumber(handle)
        with suppress(pynvml.NVMLError):  # most GPUs know no slices
            if pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE:
                return None
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    return _checked_node(Path(f"/dev/nvidia{minor}"), minor)


def reach_of_slots(device: DeviceInfo) -> str:
    """Says in words whose trials take turns on the device."""
    if folder := os.environ.get(LOCK_FOLDER_VARIABLE):
        return f"searches whose {LOCK_FOLDER_VARIABLE} is {folder}, and no others"
    if reason := _why_no_sockets():
        return f"this user's searches; others are not waited for, as there are no abstract Unix sockets ({reason})"
    node = device_node(device)
    if node is not None and os.access(node, os.R_OK):
        return f"all searches of this machine, and by {node} those of its containers"
    return f"all searches of this machine; {_NOT_BEYOND_CONTAINERS}"


_NOT_BEYOND_CONTAINERS = "those in a container with a network of its own are not waited for"


def why_containers_are_not_seen(device: DeviceInfo) -> str:
    """Says that searches in other containers are not waited for on a GPU, and why; empty where they are."""
    if device.type != "cuda" or os.environ.get(LOCK_FOLDER_VARIABLE):
        return ""
    node = device_node(device)
    if node is not None and os.access(node, os.R_OK):
        return ""
    reason = f"{node} may not be opened" if node is not None else "it has no device node of its own"
    return f"of the searches on {device.device} {_NOT_BEYOND_CONTAINERS}: {reason}"


def _checked_node(node: Path, minor: int) -> Path | None:
    """None where something else has the name."""
    try:
        found = node.lstat()
    except OSError:
        return None
    is_the_device = stat.S_ISCHR(found.st_mode) and os.minor(found.st_rdev) == minor
    return node if is_the_device else None


# -- the locks -------------------------------------------------------------------------------------


class _Held:
    """A lock that is held by an open descriptor, until it is released or the process has ended.

    A process that is forked meanwhile does not hold it: it may outlive the turn.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _all_held.append(self)

    def release(self) -> None:
        """Does nothing the second time, and in a process that was forked meanwhile."""
        if self not in _all_held:
            return
        _all_held.remove(self)
        os.close(self._descriptor)

    def close_in_fork(self) -> None:
        os.close(self._descriptor)


_all_held: list[_Held] = []


def _close_in_fork() -> None:
    for one in _all_held:
        one.close_in_fork()
    _all_held.clear()


os.register_at_fork(after_in_child=_close_in_fork)


class _Locks(Protocol):
    """The locks of one device, by names as `line`, `0.turn` and `0.trials`."""

    def take(self, name: str) -> _Held | None:
        """None where another one has it."""

    def is_free_of_trials(self, name: str) -> bool:
        """Whether the last process of the trials before has ended."""

    def for_trials(self, name: str) -> str:
        """What a trial's process is told to hold."""

    def held_by_trials(self, name: str) -> list[str]:
        """The names that `holder_of` knows for it."""

    def holder_of(self, name: str) -> str:
        """Empty where it is not known."""

    def close(self) -> None:
        """Removes what is of no use to anybody else."""


class _SocketLocks:
    """For all users of this machine's network namespace."""

    def __init__(self, device: str) -> None:
        self._prefix = f"autotune/{device}/"

    def take(self, name: str) -> _Held | None:
        descriptor = socket_lock.take(self._prefix + name)
        return None if descriptor is None else _Held(descriptor)

    def is_free_of_trials(self, name: str) -> bool:
        for one in self.held_by_trials(name):
            taken = self.take(one)
            if taken is None:
                return False
            taken.release()
        return True

    def for_trials(self, name: str) -> str:
        return f"@{self._prefix}{name}"

    def held_by_trials(self, name: str) -> list[str]:
        return [f"{name}.{number}" for number in range(HOLDERS_OF_A_TURN)]

    def holder_of(self, name: str) -> str:
        return socket_lock.holder_of(self._prefix + name)

    def close(self) -> None:
        pass


class _FileLocks:
    """For all who use the same folder. `is_temporary`: nobody else can."""

    def __init__(self, folder: Path, device: str, *, is_temporary: bool = False) -> None:
        self._folder, self._device, self._is_temporary = folder, device, is_temporary

    def take(self, name: str) -> _Held | None:
        descriptor = self._open(name)
        if _flock(descriptor, fcntl.LOCK_EX):
            return _Held(descriptor)
        os.close(descriptor)
        return None

    def is_free_of_trials(self, name: str) -> bool:
        taken = self.take(name)
        if taken is not None:
            taken.release()
        return taken is not None

    def for_trials(self, name: str) -> str:
        return str(self._file(name).absolute())

    def held_by_trials(self, name: str) -> list[str]:
        return [name]

    def holder_of(self, name: str) -> str:
        return ""

    def close(self) -> None:
        if self._is_temporary:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _open(self, name: str) -> int:
        file = self._file(name)
        try:
            return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _unusable(file, error) from None

    def _file(self, name: str) -> Path:
        return self._folder / f"{self._device}-{name}"


def _flock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _locks_of_all_users(device: DeviceInfo, name: str, note: Callable[[str], None]) -> _Locks:
    """Or, where there are no abstract sockets, those of this user, and a note."""
    reason = _why_no_sockets()
    if not reason:
        return _SocketLocks(name)
    host = re.sub(r"[^\w-]", "-", socket.gethostname())[:64]  # a home may be shared by several
    folder = private_folder(
        f"locks-{host}", purpose="the folder of device locks", bases=runtime_bases()
    )
    who = "other users" if not folder.is_temporary else "other users, and others of yours,"
    note(
        f"searches of {who} do not wait for this one's turns on {device.device}: there are no abstract Unix "
        f"sockets ({reason})" + (f", and {folder.note}" if folder.note else "")
    )
    return _FileLocks(folder.path, name, is_temporary=folder.is_temporary)


def _why_no_sockets() -> str:
    """Empty where there are abstract Unix sockets."""
    try:
        descriptor = socket_lock.take(f"autotune/{uuid.uuid4().hex}")
    except OSError as error:
        return error.strerror or str(error)
    if descriptor is not None:
        os.close(descriptor)
    return ""


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from None
    return folder


def _unusable(place: Path, error: OSError) -> StorageUnavailable:
    return StorageUnavailable(
        f"the locks of device turns cannot be kept in {place}: {error.strerror or error}",
        hint=f"let {LOCK_FOLDER_VARIABLE} name a folder that can be written to, or unset it",
    )
