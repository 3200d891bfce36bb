"""The executor of a device on a node, as the driver sees it: that of `execution/local.py`.

Tasks go to a worker on the node, which gives them to its own trial server, and their replies come
back as the lines that the server writes. What reads the user's text and weights runs on the
driver's machine, which has them. The driver keeps logs and snapshots in its own folder of the
study.
"""

import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from autotune.errors import AutotuneError, InvalidInput
from autotune.execution.cluster.files import Shipment, prepared_files, user_files
from autotune.execution.cluster.remote_worker import REQUESTS_AT_ONCE, RemoteWorker, reply_in
from autotune.execution.cluster.worker import WorkerReply
from autotune.execution.flow import POLL_SECONDS, Flow, Pause
from autotune.execution.in_turn import RunInTurn, TimedInTurn
from autotune.execution.local import LocalExecutor
from autotune.execution.server.client import Doing
from autotune.execution.server.limits import TimeLimits
from autotune.execution.tasks import (
    Examine,
    ModelSha256,
    Predict,
    Prepare,
    PrepareSeed,
    Rehearse,
    Task,
    Train,
    TrainingTask,
)
from autotune.spec.reading import parse
from autotune.spec.result import DeviceInfo
from autotune.spec.training_request import TrainingRequest
from autotune.spec.user_code import is_function_reference
from autotune.spec.workload import Workload

R = TypeVar("R")

_STUDIES = "studies"
_HOME = "home"
"""Folders of a search on a node: of its studies, and the copy of the folder it was begun in."""
_OF_THIS_MACHINE = (Prepare, PrepareSeed, ModelSha256)
"""Tasks that read the user's text and weights, which the driver's machine has."""
_SECONDS_TO_ANSWER = 60.0
_SECONDS_TO_LEAVE = 5.0


class ClusterExecutor(LocalExecutor):
    """Runs a study's trials through a worker on a node with so many `cores`.

    `excluded` are files and folders of the driver that no node needs, such as the database. Where a
    trial has several nodes, this is the executor of the first, and `others` are those of the other
    ones; `release` gives them all back to Ray.
    """

    def __init__(
        self,
        folder: Path,
        *,
        worker: RemoteWorker,
        shipment: Shipment,
        excluded: Sequence[Path],
        cores: int,
        should_stop: Callable[[], bool],
        note: Callable[[str], None],
        others: "Sequence[ClusterExecutor]" = (),
        release: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(folder, should_stop=should_stop, note=note)
        self.worker = worker
        self.others = others
        self._release = release
        self._device: DeviceInfo | None = None
        """The first one that a trial uses on this node, where the node is not a trial's first."""
        self.cores = cores
        self._shipment = shipment
        self._excluded = excluded
        self._brought: set[str] = set()
        """Folders that the worker's node has."""

    @property
    def predictions_at_once(self) -> int:
        return REQUESTS_AT_ONCE

    @property
    def workers(self) -> list[RemoteWorker]:
        """Those of all nodes of a trial, the first one first."""
        return [self.worker, *(other.worker for other in self.others)]

    @property
    def is_lost(self) -> bool:
        """Whether the worker of any of its nodes is."""
        return any(worker.is_lost for worker in self.workers)

    # -- tasks -------------------------------------------------------------------------------------

    def call(
        self, task: Task[R], *, log_name: str | None = None, limits: TimeLimits | None = None
    ) -> Future[R]:
        if type(task) in _OF_THIS_MACHINE:
            return super().call(task, log_name=log_name, limits=limits)
        log_name = log_name or task.log_name

        def read(answer: WorkerReply) -> R:
            self._note_lost(answer)
            if isinstance(task, TrainingTask):
                logs = task.training.folder.parent / "logs"
                _write(logs / f"{log_name}.log", answer.log)
                _write(task.training.snapshot_file, answer.snapshot)
            value = task.value_of(reply_in(answer))
            self.worker.has_worked |= isinstance(task, Train)
            return value

        sent = self._with_files_on_node(task)
        return self.worker.request("call", read, task=sent, log_name=log_name, limits=limits)

    def _note_lost(self, answer: WorkerReply) -> None:
        for number, why in answer.lost:
            if number < len(self.others):
                self.others[number].worker.give_up(why)

    def check_stop(self, *, hint: str = "run the same command again to continue") -> None:
        for worker in self.workers:
            worker.check()
        super().check_stop(hint=hint)

    def doing(self, future: Future[Any]) -> Doing:
        self.worker.check()
        return self.worker.state.doing

    def cancel(self, future: Future[Any]) -> None:
        self.worker.cancel(future)
        super().cancel(future)

    def carry_out(self, run: RunInTurn) -> TimedInTurn:
        def read(answer: WorkerReply) -> TimedInTurn:
            self._note_lost(answer)
            timed = parse(TimedInTurn, reply_in(answer).result)
            self.worker.has_worked = True
            return timed

        sent = replace(run, trainings=tuple(map(self._with_folder_on_node, run.trainings)))
        return self.wait_for(self.worker.request("carry_out", read, run=sent))

    def shutdown(self) -> None:
        self.close_workers()
        super().shutdown()

    def close_workers(self) -> None:
        """Ends the workers of all nodes of a trial."""
        closing = [threading.Thread(target=worker.close) for worker in self.workers]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        self._release()

    # -- the device --------------------------------------------------------------------------------

    def take_slot(
        self,
        device: DeviceInfo,
        *,
        places: int = 1,
        on_wait: Callable[[str], None],
        alone: bool = False,
    ) -> Flow[ExitStack]:
        on_nodes = {
            self.worker.node: self._take_here(device, places=places, on_wait=on_wait, alone=alone)
        }
        for other in self.others:
            if other._device is not None:  # else they are not chosen yet, as in the first probe
                on_nodes[other.worker.node] = other._take_here(
                    other._device, places=places, on_wait=on_wait, alone=alone
                )
        with ExitStack() as stack:
            # All searches take them in the same order, so that no two wait for each other.
            for node in sorted(on_nodes):
                stack.enter_context((yield from on_nodes[node]))
            return stack.pop_all()

    def _take_here(
        self, device: DeviceInfo, *, places: int, on_wait: Callable[[str], None], alone: bool
    ) -> Flow[ExitStack]:
        taken = self.worker.request(
            "take_slot",
            reply_in,
            devices=(device, *self.other_devices),
            places=places,
            alone=alone,
        )
        was_reported = False
        try:
            while not taken.done():
                self.worker.check()
                holder = self.worker.state.waits_for
                if holder is not None and not was_reported:
                    was_reported = True
                    on_wait(holder)
                yield Pause(POLL_SECONDS, unless=taken)
        except BaseException:
            self.cancel(taken)
            raise
        taken.result()
        self._held = (self.worker.place,)
        self._shares_device = places > 1 and not alone
        with ExitStack() as stack:
            stack.callback(self._leave_slot)
            stack.callback(self._forget_slot)
            return stack.pop_all()

    def _leave_slot(self) -> None:
        left = self.worker.request("leave_slot", reply_in)
        if self._should_stop():
            return  # the worker is ended soon
        try:
            left.result(timeout=_SECONDS_TO_LEAVE)
        except (AutotuneError, NotYet):
            pass  # the worker has ended, and its slot with it

    def use_devices_from(self, first: DeviceInfo, *, count: int, nodes: int = 1) -> None:
        """As that of one machine, with equal parts on each of the trial's nodes.

        Raises InvalidInput where the devices of another node are not of the model of `first`.
        """
        super().use_devices_from(first, count=count // nodes)
        for other in self.others:
            device, _ = other.probe(first.type, {})
            if device.name != first.name or not device.is_of_model(first):
                raise InvalidInput(
                    f"{other.worker.place} has {device.model}, and {self.worker.place} has "
                    f"{first.model}: they cannot train together",
                    hint="let the nodes of a trial have devices of one model",
                )
            other._device = device
            other.use_devices_from(device, count=count // nodes)

    def checking_device(self, device: str) -> Flow[None]:
        yield from super().checking_device(device)
        for other in self.others:
            yield from other.checking_device(device)

    def _named(self, device: DeviceInfo) -> DeviceInfo:
        self.sharing = self.worker.sharing
        return super()._named(device)

    # -- files -------------------------------------------------------------------------------------

    def bring(self, workload: Workload, prepared: Path) -> None:
        """Sends the nodes what trials of a workload need, before the first of them."""
        for executor in (self, *self.others):
            executor._bring_user_files(workload)
            executor._bring_prepared(prepared)

    def _with_files_on_node(self, task: Task[R]) -> Task[R]:
        """Returns the task with the paths that its files have on the node, where they are sent."""
        match task:
            case Examine() | Rehearse():
                self._bring_user_files(task.workload)
            case Predict():
                self._bring_user_files(task.request.workload)
            case TrainingTask():
                return replace(task, training=self._with_folder_on_node(task.training))
        return task

    def _with_folder_on_node(self, training: TrainingRequest) -> TrainingRequest:
        """Returns the training with paths that are relative to the search's folder on its nodes."""
        self.bring(training.workload, training.folder)
        folder = Path(_folder_of(training.folder))
        snapshot_file = training.snapshot_file
        if snapshot_file is not None:
            snapshot_file = folder.with_name("snapshots") / snapshot_file.name
        return replace(training, folder=folder, snapshot_file=snapshot_file)

    def _bring_prepared(self, prepared: Path) -> None:
        folder = _folder_of(prepared)
        if folder not in self._brought and prepared.is_dir():
            self._shipment.bring(
                self.worker,
                folder,
                prepared_files(prepared),
                may_change=False,
                should_stop=self._should_stop,
            )
            self._brought.add(folder)

    def _bring_user_files(self, workload: Workload) -> None:
        """Has the node run in this folder, which it sees, or in a copy of it."""
        is_users = workload.script is not None or is_function_reference(workload.model)
        if not is_users or _HOME in self._brought:
            return
        here = Path.cwd()
        if not self._is_seen_by_node(here):
            self._shipment.bring(
                self.worker,
                _HOME,
                user_files(here, excluded=self._excluded),
                may_change=True,
                should_stop=self._should_stop,
            )
            self._work_in(_HOME)
        self._brought.add(_HOME)

    def _is_seen_by_node(self, folder: Path) -> bool:
        """Whether the node has the driver's folder, and has gone there."""
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".autotune-seen-") as mark:
                return self._work_in(str(folder), mark=mark.name)
        except OSError:  # a folder that this user may not write to
            return False

    def _work_in(self, folder: str, *, mark: str | None = None) -> bool:
        went = self.worker.ask(
            "work_in",
            seconds=_SECONDS_TO_ANSWER,
            should_stop=self._should_stop,
            folder=folder,
            mark=mark,
        )
        return bool(went)


def _folder_of(prepared: Path) -> str:
    """Returns where a study's folder of prepared files is in that of the search on a node."""
    return f"{_STUDIES}/{prepared.parent.name}/{prepared.name}"


def _write(file: Path | None, content: bytes | None) -> None:
    """Writes what a trial has left on its node, if it has."""
    if file is None or content is None:
        return
    with suppress(OSError):  # the log's disk is full
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
