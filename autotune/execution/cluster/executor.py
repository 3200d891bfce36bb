"""The executor of a device on a node, as the driver sees it: that of `execution/local.py`.

What reads the user's text and weights (`prepare`) runs on the driver's machine, which has them; all
else runs on the node. The driver keeps logs and snapshots in its own folder of the study.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError, Stopped, TrialLost
from autotune.execution.cluster.files import Shipment, prepared_files, user_files
from autotune.execution.cluster.remote_worker import REQUESTS_AT_ONCE, RemoteWorker
from autotune.execution.device_slots import DeviceSlots
from autotune.execution.in_turn import TimedInTurn, TrainingInTurn
from autotune.execution.local import LocalExecutor
from autotune.execution.server.client import Doing, Reply
from autotune.execution.server_tasks import POLL_SECONDS, prepared_folder
from autotune.execution.trial_options import TrialOptions
from autotune.spec.attempt import FinishedTrial
from autotune.spec.config import TrainingConfig
from autotune.spec.early_stopping import PruningBound
from autotune.spec.parity import NoTrace, ParityTrace
from autotune.spec.prediction import Extrapolation
from autotune.spec.result import DeviceInfo
from autotune.spec.study import StudyDefinition
from autotune.spec.user_code import is_function_reference
from autotune.spec.workload import LinearShape, Workload

_STUDIES = "studies"
_HOME = "home"
"""Folders of a search on a node: of its studies, and the copy of the folder it was begun in."""
_SECONDS_TO_ANSWER = 60.0
_SECONDS_TO_LEAVE = 5.0


@dataclass(frozen=True, kw_only=True)
class RemoteSlots:
    """The slots of a device on a node; the node's worker waits for one and holds it."""

    device: DeviceInfo
    places: int

    def holder(self) -> str:
        return ""

    def close(self) -> None:
        pass


class ClusterExecutor(LocalExecutor):
    """Runs a study's trials through a worker on a node.

    `excluded` are files and folders of the driver that no node needs, such as the database.
    """

    def __init__(
        self,
        folder: Path,
        *,
        worker: RemoteWorker,
        shipment: Shipment,
        excluded: Sequence[Path],
        should_stop: Callable[[], bool],
        note: Callable[[str], None],
    ) -> None:
        super().__init__(folder, should_stop=should_stop, note=note)
        self.worker = worker
        self._shipment = shipment
        self._excluded = excluded
        self._brought: set[str] = set()
        """Folders that the worker's node has."""
        self._requests: dict[Future[Any], Future[Any]] = {}
        """The request to the worker behind each future that was given out."""

    # -- requests ----------------------------------------------------------------------------------

    def _request(self, method: str, **arguments: Any) -> Future[Any]:
        future = self.worker.request(method, **arguments)
        self._requests[future] = future
        future.add_done_callback(lambda done: self._requests.pop(done, None))
        return future

    def _wait(self, future: Future[Any], *, each: Callable[[], None] = lambda: None) -> Any:
        """Returns the result of a request; raises its error, and Stopped."""
        while True:
            try:
                return future.result(timeout=POLL_SECONDS)
            except NotYet:
                self.worker.check()
                each()
                if self._should_stop():
                    self.worker.cancel(future)
                    raise Stopped(
                        "the search was stopped", hint="the same command begins again"
                    ) from None

    def wait_for(self, future: Future[Reply]) -> Reply:
        if future not in self._requests and not future.done():
            return super().wait_for(future)  # of this machine's trial server
        reply: Reply = self._wait(future)
        return reply

    @property
    def is_lost(self) -> bool:
        return self.worker.is_lost

    # -- the device --------------------------------------------------------------------------------

    @contextmanager
    def slot(
        self,
        slots: "DeviceSlots | RemoteSlots",
        *,
        on_wait: Callable[[str], None],
        alone: bool = False,
    ) -> Iterator[None]:
        assert isinstance(slots, RemoteSlots)
        was_reported = False

        def report_wait() -> None:
            nonlocal was_reported
            holder = self.worker.state.waits_for
            if holder is not None and not was_reported:
                was_reported = True
                on_wait(holder)

        taken = self._request("take_slot", device=slots.device, places=slots.places, alone=alone)
        self._wait(taken, each=report_wait)
        self._held = (self.worker.place,)
        try:
            yield
        finally:
            self._held = ()
            self._leave_slot()

    def _leave_slot(self) -> None:
        left = self._request("leave_slot")
        if self._should_stop():
            return  # the worker is ended soon
        try:
            left.result(timeout=_SECONDS_TO_LEAVE)
        except (AutotuneError, NotYet):
            pass  # the worker has ended, and its slot with it

    def slots_on(self, device: DeviceInfo, *, places: int = 1) -> Any:
        return RemoteSlots(device=device, places=places)

    def identify(self, device: str | None) -> DeviceInfo:
        found: DeviceInfo = self._wait(self._request("identify", device=device))
        return found

    def probe(
        self,
        device: str | None,
        choices: Mapping[str, Sequence[Any]],
        *,
        anew: bool = False,
    ) -> tuple[DeviceInfo, dict[str, dict[str, str]]]:
        choices = {technique: list(values) for technique, values in choices.items()}
        options = {"anew": True} if anew else {}
        request = self._request("probe", device=device, choices=choices, **options)
        found: tuple[DeviceInfo, dict[str, dict[str, str]]] = self._wait(request)
        return found

    def measure_peaks(
        self, device: DeviceInfo, precisions: Sequence[str], shape: LinearShape | None
    ) -> DeviceInfo:
        request = self._request(
            "measure_peaks", device=device, precisions=list(precisions), shape=shape
        )
        found: DeviceInfo = self._wait(request)
        return found

    def examine(
        self, workload: Workload, choices: Mapping[str, Sequence[Any]], *, device: str
    ) -> tuple[Workload, dict[str, dict[str, str]]]:
        self._bring_user_files(workload)
        choices = {technique: list(values) for technique, values in choices.items()}
        request = self._request("examine", workload=workload, choices=choices, device=device)
        found: tuple[Workload, dict[str, dict[str, str]]] = self._wait(request)
        return found

    def rehearse(self, workload: Workload, *, micro_batch_size: int, device: str) -> str:
        self._bring_user_files(workload)
        request = self._request(
            "rehearse", workload=workload, micro_batch_size=micro_batch_size, device=device
        )
        return str(self._wait(request))

    def devices(self) -> list[DeviceInfo]:
        found: list[DeviceInfo] = self._wait(self._request("devices"))
        return found

    def use_devices_from(self, first: DeviceInfo, *, count: int) -> None:
        self._wait(self._request("use_devices_from", first=first, count=count))

    def check_device(self, device: str) -> None:
        if self.worker.is_lost:
            raise TrialLost(self.worker.why_lost, hint="run the same command again to continue")
        self._wait(self._request("check_device", device=device))

    # -- files -------------------------------------------------------------------------------------

    def bring(self, definition: StudyDefinition, study_folder: Path) -> None:
        """Sends the node what the trials of a study need, before its first trial."""
        self._bring_user_files(definition.workload)
        self._bring_prepared(definition, definition.workload, study_folder)

    def _bring_prepared(
        self, definition: StudyDefinition, workload: Workload, study_folder: Path
    ) -> None:
        name = prepared_folder(definition.workload, workload)
        folder = f"{_STUDIES}/{definition.name}/{name}"
        if folder not in self._brought and (study_folder / name).is_dir():
            self._shipment.bring(
                self.worker,
                folder,
                prepared_files(study_folder / name),
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
            self._ask("work_in", _HOME)
        self._brought.add(_HOME)

    def _is_seen_by_node(self, folder: Path) -> bool:
        """Whether the node has the driver's folder, and has gone there."""
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".autotune-seen-") as mark:
                return bool(self._ask("work_in", str(folder), mark.name))
        except OSError:  # a folder that this user may not write to
            return False

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self.worker.ask(
            method, *arguments, seconds=_SECONDS_TO_ANSWER, should_stop=self._should_stop
        )

    # -- trials ------------------------------------------------------------------------------------

    @property
    def predictions_at_once(self) -> int:
        return REQUESTS_AT_ONCE

    def submit_prediction(
        self,
        workload: Workload,
        config: TrainingConfig,
        *,
        device_type: str,
        compute_capability: str | None = None,
        torch_version: str | None = None,
        with_timeline: bool = False,
        extrapolates: Extrapolation = "nothing",
    ) -> Future[Reply]:
        self._bring_user_files(workload)
        return self._request(
            "predict",
            workload=workload,
            config=config,
            device_type=device_type,
            compute_capability=compute_capability,
            torch_version=torch_version,
            with_timeline=with_timeline,
            extrapolates=extrapolates,
        )

    def submit(
        self,
        definition: StudyDefinition,
        config: TrainingConfig,
        *,
        study_folder: Path,
        log_name: str,
        enforce_cap: bool,
        trial_options: TrialOptions,
        workload: Workload | None = None,
        reference: ParityTrace | None = None,
        shares_perplexity: bool = False,
        evaluates_only: bool = False,
        pruning_bounds: Sequence[PruningBound] = (),
    ) -> Future[FinishedTrial]:
        self._bring_user_files(definition.workload)
        self._bring_prepared(definition, workload or definition.workload, study_folder)
        request = self._request(
            "train",
            study=definition.name,
            log_name=log_name,
            definition=definition,
            config=config,
            enforce_cap=enforce_cap,
            trial_options=trial_options,
            workload=workload,
            reference=reference,
            shares_perplexity=shares_perplexity,
            evaluates_only=evaluates_only,
            pruning_bounds=tuple(pruning_bounds),
        )
        finished: Future[FinishedTrial] = Future()
        self._requests[finished] = request

        def finish(done: Future[Any]) -> None:
            self._requests.pop(finished, None)
            try:
                answer = done.result()
                _write(study_folder / "logs" / f"{log_name}.log", answer["log"])
                _write(study_folder / "snapshots" / f"{log_name}.pickle", answer["snapshot"])
            except Exception as error:  # whatever it is, the search waits for this future
                finished.set_exception(error)
            else:
                finished.set_result(answer["finished"])

        request.add_done_callback(finish)
        return finished

    def wait_for_trial(self, future: Future[FinishedTrial]) -> FinishedTrial:
        request = self._requests.get(future)
        if request is not None:
            self._wait(request)
        return future.result()

    def doing(self, future: Future[FinishedTrial]) -> Doing:
        self.worker.check()
        return self.worker.state.doing

    def cancel(self, future: Future[FinishedTrial]) -> None:
        request = self._requests.get(future)
        if request is not None:
            self.worker.cancel(request)

    def trace(
        self,
        definition: StudyDefinition,
        config: TrainingConfig,
        *,
        study_folder: Path,
        dropout: bool,
        dequantized: bool = False,
        trial_options: TrialOptions,
        workload: Workload | None = None,
    ) -> ParityTrace | NoTrace:
        self.bring(definition, study_folder)
        request = self._request(
            "trace",
            study=definition.name,
            definition=definition,
            config=config,
            dropout=dropout,
            dequantized=dequantized,
            trial_options=trial_options,
            workload=workload,
        )
        found: ParityTrace | NoTrace = self._wait(request)
        return found

    def time_in_turn(
        self,
        definition: StudyDefinition,
        trainings: Sequence[TrainingInTurn],
        *,
        study_folder: Path,
        log_name: str,
        trial_options: TrialOptions,
        rounds: int,
        seed: int,
        on_progress: Callable[[int, int], None] = lambda done, wanted: None,
    ) -> TimedInTurn:
        self.bring(definition, study_folder)
        request = self._request(
            "time_in_turn",
            study=definition.name,
            log_name=log_name,
            definition=definition,
            trainings=tuple(trainings),
            trial_options=trial_options,
            rounds=rounds,
            seed=seed,
        )
        told: tuple[int, int] | None = None

        def report_progress() -> None:
            nonlocal told
            progress = self.worker.state.progress
            if progress is not None and progress != told:
                told = progress
                on_progress(*progress)

        timed: TimedInTurn = self._wait(request, each=report_progress)
        return timed

    def shutdown(self) -> None:
        self.worker.close()
        super().shutdown()


def _write(file: Path, content: bytes | None) -> None:
    """Writes what a trial has left on its node; nothing for None."""
    if content is None:
        return
    with suppress(OSError):  # the log's disk is full
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
