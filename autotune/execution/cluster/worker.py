"""What runs on a node, in a Ray actor: an executor with its trial server, for one device.

The actor has a slot of the device that Ray gave it. It keeps its trial server from trial to trial,
since importing torch takes longer than many a trial. Whatever kills the actor ends the server and
the trial, as the end of a search does on its own machine.
"""

import os
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
import ray.util

from autotune.errors import AutotuneError, Stopped
from autotune.execution.cluster.node_folder import NodeFolder
from autotune.execution.cpu_shares import cpu_share, sharing_of_cpus
from autotune.execution.flow import POLL_SECONDS
from autotune.execution.in_turn import RunInTurn, TimedInTurn, time_in_turn
from autotune.execution.local import LocalExecutor
from autotune.execution.server.client import Doing
from autotune.execution.server.limits import TimeLimits
from autotune.execution.server.replies import line_of, reply_after
from autotune.execution.server.trial_log import LARGEST_LOG_BYTES
from autotune.execution.tasks import Task, TrainingTask
from autotune.memory.nvml import open_device
from autotune.spec.limits import Number
from autotune.spec.result import DeviceInfo
from autotune.spec.schema import Schema
from autotune.spec.training_request import TrainingRequest

R = TypeVar("R")

_SECONDS_TO_END_A_TRIAL = 5.0


@dataclass(frozen=True, kw_only=True)
class WorkerReply(Schema):
    """What a request to a worker ended with."""

    line: bytes
    """As the trial server writes it (`execution/server/replies.py`)."""
    notes: tuple[str, ...] = ()
    """Sentences for the user."""
    log: bytes | None = None
    """What a training has printed, from the end of its log."""
    snapshot: bytes | None = None
    lost: tuple[tuple[Number, str], ...] = ()
    """The numbers of a trial's other nodes, from 0, whose workers were lost meanwhile, and why."""


@dataclass(frozen=True, kw_only=True)
class WorkerState:
    """What a worker is doing, as a driver is told while it waits."""

    version: int = 0
    """Grows with every change."""
    doing: Doing = field(default_factory=Doing)
    """What the running trial does."""
    waits_for: str | None = None
    """Who has the device slot that it waits for; empty where that is not known, None if it does not
    wait."""


class NodeWorker:
    """Runs what a driver asks for on one device: one trial at a time, or several predictions.

    `search` names the folder of the search on the node. `slots` is how many workers of the search
    share the node's `cpus`, and `slot` the number of this one, from 0. `threads` is the driver's
    OMP_NUM_THREADS, in place of the one that Ray sets.
    """

    def __init__(
        self,
        *,
        search: str,
        slot: int,
        slots: int,
        cpus: int,
        threads: str | None,
        make_executor: Callable[..., LocalExecutor] = LocalExecutor,
    ) -> None:
        if threads is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = threads
        self._folder = NodeFolder(search)
        self._changed = threading.Condition()
        self._state = WorkerState()
        self._request = threading.local()
        """`number` of the request that a thread carries out."""
        self._cancelled: set[int] = set()
        self._notes: list[str] = []
        self._held = ExitStack()
        self._devices: tuple[DeviceInfo, ...] = ()
        """Those of the slot."""
        self._executor = make_executor(
            self._folder.path, should_stop=self._should_stop, note=self._notes.append
        )
        self._shares = [cpu_share(number, of=slots, most_cpus=cpus) for number in range(slots)]
        self._executor.cpus = self._shares[slot]
        self._sharing = sharing_of_cpus(slots, most_cpus=cpus)

    def describe(self) -> dict[str, Any]:
        """Returns how CPUs are shared, and the search's folder with the bytes free in it."""
        return {
            "sharing": self._sharing,
            "folder": str(self._folder.path),
            "free_bytes": shutil.disk_usage(self._folder.path).free,
        }

    # -- what the driver sees while it waits -------------------------------------------------------

    def state(self, seen: int, seconds: float) -> WorkerState:
        """Returns the state as soon as its version is another than `seen`, or after `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._state.version != seen, timeout=seconds)
            state = self._state
        return replace(state, doing=replace(state.doing, used_bytes=self._used_bytes()))

    def _used_bytes(self) -> int | None:
        """Returns the memory in use on the GPU of the slot; None where NVML does not know it.

        Of several GPUs, that on which most is in use.
        """
        used = []
        for device in self._devices:
            if device.uuid_of_nvml is None:
                return None
            try:
                used.append(open_device(device.uuid_of_nvml).used_bytes())
            except AutotuneError:
                return None  # the GPU is lost
        return max(used, default=None)

    def _tell(self, **changes: Any) -> None:
        with self._changed:
            self._state = WorkerState(version=self._state.version + 1, **changes)
            self._changed.notify_all()

    def cancel(self, request: int) -> None:
        """Ends a request, which then raises Stopped; nothing where it has ended."""
        self._cancelled.add(request)

    def _should_stop(self) -> bool:
        return getattr(self._request, "number", None) in self._cancelled

    # -- files -------------------------------------------------------------------------------------

    def lacking(self, digests: list[str]) -> list[str]:
        """Returns which of the contents, given by SHA-256, the node does not have."""
        return self._folder.lacking(digests)

    def receive(self, digest: str, chunks: list[Any]) -> None:
        """Writes a content whose `chunks` are references to bytes. Raises TrialLost."""
        self._folder.receive(digest, (ray.get(chunk) for chunk in chunks))

    def assemble(self, folder: str, manifest: Mapping[str, str], may_change: bool) -> None:
        """Makes the folder, with a file for each {path: SHA-256}."""
        self._folder.assemble(folder, manifest, may_change=may_change)

    def work_in(self, folder: str, mark: str | None = None) -> bool:
        """Runs everything in `folder`: an absolute path, or that of a folder that was assembled.

        With `mark`, a file of the driver, only where this node sees that file, too. Returns whether
        it does.
        """
        path = self._folder.path / folder
        if mark is not None and not (Path(mark).exists() and path.is_dir()):
            return False
        os.chdir(path)
        self._executor.end_server()  # it is in the folder in which it was started
        return True

    # -- requests ----------------------------------------------------------------------------------

    def perform(self, request: int, method: str, arguments: Mapping[str, Any]) -> WorkerReply:
        """Calls a method of this worker, and returns what came of it."""
        self._request.number = request
        try:
            reply = reply_after(partial(getattr(self, method), **arguments))
        finally:
            self._cancelled.discard(request)
            self._tell()
        notes = tuple(self._notes)
        del self._notes[: len(notes)]
        answer = WorkerReply(line=line_of(asdict(reply)), notes=notes, lost=self._lost())
        task = arguments.get("task")
        if not isinstance(task, TrainingTask):
            return answer
        training = self._here(task.training)
        log = training.folder.parent / "logs" / f"{arguments['log_name']}.log"
        return replace(
            answer,
            log=_taken(log, most_bytes=LARGEST_LOG_BYTES),
            snapshot=_taken(training.snapshot_file),
        )

    def _lost(self) -> tuple[tuple[int, str], ...]:
        """Returns the numbers of the other nodes whose workers are lost, and why."""
        return ()

    def take_slot(self, *, devices: tuple[DeviceInfo, ...], places: int, alone: bool) -> None:
        """Waits for a slot on the devices, and tells the driver meanwhile who has it."""
        self._devices = devices
        first, *others = devices
        self._executor.other_devices = tuple(others)
        if first.type == "cpu":
            self._executor.cpus_of_slots = self._shares
        self._held.close()  # one that was granted just when the driver gave up
        with ExitStack() as held:
            held.enter_context(
                self._executor.slot(
                    first,
                    places=places,
                    on_wait=lambda holder: self._tell(waits_for=holder),
                    alone=alone,
                )
            )
            if self._should_stop():
                raise Stopped("the search was stopped", hint="the same command begins again")
            self._held = held.pop_all()

    def leave_slot(self) -> None:
        """Gives the slot back."""
        self._held.close()

    def call(self, *, task: Task[Any], log_name: str, limits: TimeLimits | None) -> Any:
        """Returns what a task finds, and tells the driver meanwhile what it does."""
        future = self._begin(task, log_name=log_name, limits=limits)
        told = Doing()
        while not wait([future], timeout=POLL_SECONDS).done:
            if self._should_stop():
                self._cancel(future)
                wait([future], timeout=_SECONDS_TO_END_A_TRIAL)
                raise Stopped("the search was stopped", hint="the same command begins again")
            now = self._doing(future)
            if now != told:
                told = now
                self._tell(doing=now)
        return future.result()

    def carry_out(self, *, run: RunInTurn) -> TimedInTurn:
        """Times trainings in turn."""
        return time_in_turn(
            run, call=self._begin, cancel=self._cancel, should_stop=self._should_stop
        )

    def _begin(self, task: Task[R], *, log_name: str, limits: TimeLimits | None) -> Future[R]:
        """Begins a task, whose files are in the search's folder on this node."""
        if isinstance(task, TrainingTask):
            task = replace(task, training=self._here(task.training))
        return self._executor.call(task, log_name=log_name, limits=limits)

    def _cancel(self, future: Future[Any]) -> None:
        self._executor.cancel(future)

    def _doing(self, future: Future[Any]) -> Doing:
        return self._executor.doing(future)

    def _here(self, training: TrainingRequest) -> TrainingRequest:
        """Returns the training with this node's folder, and its devices if the node is not first.

        The driver knows the devices of the first one.
        """
        folder = self._folder.path / training.folder
        snapshot_file = training.snapshot_file
        if snapshot_file is not None:
            snapshot_file = self._folder.path / snapshot_file
        training = replace(training, folder=folder, snapshot_file=snapshot_file)
        if training.ranks is None:
            return training
        first, *others = self._devices
        return replace(
            training,
            ranks=replace(training.ranks, address=ray.util.get_node_ip_address()),
            device=first.device,
            device_uuid=first.uuid_of_nvml,
            other_devices=tuple((other.device, other.uuid_of_nvml) for other in others),
        )

    def close(self) -> None:
        """Ends everything that runs, and removes the search's folder after its last worker."""
        self._held.close()
        self._executor.shutdown()
        os.chdir("/")
        self._folder.close()


def _taken(file: Path | None, *, most_bytes: int | None = None) -> bytes | None:
    """Returns the content of a file, or its end, and removes it; None where there is none."""
    if file is None:
        return None
    with suppress(OSError):
        with file.open("rb") as opened:
            if most_bytes is not None:
                opened.seek(max(0, file.stat().st_size - most_bytes))
            content = opened.read()
        file.unlink()
        return content
    return None
