"""What runs on a node, in a Ray actor: an executor with its trial server, for one device.

The actor has a slot of the device that Ray gave it. It keeps its trial server from trial to trial,
since importing torch takes longer than many a trial. Whatever kills the actor ends the server and
the trial, as the end of a search does on its own machine.
"""

import os
import shutil
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from autotune.errors import AutotuneError, Stopped
from autotune.execution.cluster.node_folder import NodeFolder
from autotune.execution.cpu_shares import cpu_share, sharing_of_cpus
from autotune.execution.local import LocalExecutor
from autotune.execution.server.client import Doing, Reply
from autotune.execution.server.trial_log import LARGEST_LOG_BYTES
from autotune.execution.server_tasks import POLL_SECONDS
from autotune.memory.nvml import open_device
from autotune.spec.result import DeviceInfo
from autotune.spec.schema import Schema

_SECONDS_TO_END_A_TRIAL = 5.0
FORWARDED = frozenset(
    {
        "identify",
        "probe",
        "measure_peaks",
        "examine",
        "rehearse",
        "check_device",
        "devices",
        "use_devices_from",
    }
)
"""Methods of `LocalExecutor` that are called as they are."""


@dataclass(frozen=True, kw_only=True)
class WorkerReply(Schema):
    """What a request to a worker ended with."""

    value: Any = None
    error: tuple[str, str, str] | None = None
    """Name, message and hint of an AutotuneError."""
    notes: tuple[str, ...] = ()
    """Sentences for the user."""


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
    progress: tuple[int, int] | None = None
    """Blocks that were timed and that are wanted, of trainings in turn."""


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
        self._device: DeviceInfo | None = None
        """That of the slot."""
        self._executor = make_executor(
            self._folder.path, should_stop=self._should_stop, note=self._notes.append
        )
        self._shares = [cpu_share(number, of=slots, most_cpus=cpus) for number in range(slots)]
        self._executor.cpus = self._shares[slot]
        self._executor.sharing = sharing_of_cpus(slots, most_cpus=cpus)

    def describe(self) -> dict[str, Any]:
        """Returns the host, the GPUs that Ray gave, and the bytes free in the search's folder."""
        return {
            "host": socket.gethostname(),
            "gpus": [str(number) for number in ray.get_gpu_ids()],
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
        if self._device is None:
            return None
        used = []
        for device in (self._device, *self._executor.other_devices):
            if device.uuid is None or not device.is_known_to_nvml:
                return None
            try:
                used.append(open_device(device.uuid).used_bytes())
            except AutotuneError:
                return None  # the GPU is lost
        return max(used)

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
        """Does what a driver asks for, and returns what came of it."""
        self._request.number = request
        try:
            if method in FORWARDED:
                value = getattr(self._executor, method)(**arguments)
            else:
                value = getattr(self, f"_{method}")(**arguments)
        except AutotuneError as error:
            told = (type(error).__name__, error.message, error.hint)
            return WorkerReply(error=told, notes=self._take_notes())
        finally:
            self._cancelled.discard(request)
            self._tell()
        return WorkerReply(value=value, notes=self._take_notes())

    def _take_notes(self) -> tuple[str, ...]:
        notes = tuple(self._notes)
        del self._notes[: len(notes)]
        return notes

    def _take_slot(self, *, device: DeviceInfo, places: int, alone: bool) -> None:
        self._device = device
        if device.type == "cpu":
            self._executor.cpus_of_slots = self._shares
        slots = self._executor.slots_on(device, places=places)
        self._held.close()  # one that was granted just when the driver gave up
        with ExitStack() as held:
            held.enter_context(
                self._executor.slot(
                    slots,
                    on_wait=lambda holder: self._tell(waits_for=holder),
                    alone=alone,
                )
            )
            if self._should_stop():
                raise Stopped("the search was stopped", hint="the same command begins again")
            self._held = held.pop_all()

    def _leave_slot(self) -> None:
        self._held.close()

    def _train(self, *, study: str, log_name: str, **arguments: Any) -> dict[str, Any]:
        folder = self._folder.path / "studies" / study
        future = self._executor.submit(study_folder=folder, log_name=log_name, **arguments)
        self._wait_for(future)
        snapshot = folder / "snapshots" / f"{log_name}.pickle"
        sent = None
        if snapshot.exists():
            sent = snapshot.read_bytes()
            snapshot.unlink()
        return {
            "finished": future.result(),
            "log": self._log_of(folder, log_name),
            "snapshot": sent,
        }

    def _wait_for(self, future: Future[Any]) -> None:
        """Waits for a training, and tells the driver what it does. Raises Stopped."""
        told = Doing()
        while not wait([future], timeout=POLL_SECONDS).done:
            if self._should_stop():
                self._executor.cancel(future)
                wait([future], timeout=_SECONDS_TO_END_A_TRIAL)
                raise Stopped("the search was stopped", hint="the same command begins again")
            now = self._executor.doing(future)
            if now != told:
                told = now
                self._tell(doing=now)

    def _log_of(self, folder: Path, log_name: str) -> bytes:
        log = folder / "logs" / f"{log_name}.log"
        with suppress(OSError):
            with log.open("rb") as opened:
                opened.seek(max(0, log.stat().st_size - LARGEST_LOG_BYTES))
                text = opened.read(LARGEST_LOG_BYTES)
            log.unlink()
            return text
        return b""

    def _trace(self, *, study: str, **arguments: Any) -> Any:
        return self._executor.trace(study_folder=self._folder.path / "studies" / study, **arguments)

    def _predict(self, **arguments: Any) -> Reply:
        return self._executor.wait_for(self._executor.submit_prediction(**arguments))

    def _time_in_turn(self, *, study: str, log_name: str, **arguments: Any) -> Any:
        return self._executor.time_in_turn(
            study_folder=self._folder.path / "studies" / study,
            log_name=log_name,
            on_progress=lambda done, wanted: self._tell(progress=(done, wanted)),
            **arguments,
        )

    def close(self) -> None:
        """Ends everything that runs, and removes the search's folder after its last worker."""
        self._held.close()
        self._executor.shutdown()
        os.chdir("/")
        self._folder.close()
