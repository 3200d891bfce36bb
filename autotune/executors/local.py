"""Trials on a device of this machine, one at a time, each in a process of its own."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from autotune.config import TrainingConfig
from autotune.definition import StudyDefinition
from autotune.errors import Stopped
from autotune.parity import ParityTrace
from autotune.result import DeviceInfo, Measurement
from autotune.rival import Rival
from autotune.trial.client import Reply, TrialServer
from autotune.workload import Workload

POLL_SECONDS = 0.1
"""How often a wait looks whether it should end."""

PREPARED = "prepared"
"""Folder of a study's token streams and initial weights."""


def prepared_folder(of_study: Workload, workload: Workload) -> str:
    """The folder for `workload`, which may have another seed than the study's own."""
    return PREPARED if workload.seed == of_study.seed else f"{PREPARED}-seed-{workload.seed}"


@dataclass(frozen=True, kw_only=True)
class FinishedTrial:
    measurement: Measurement
    seconds: float
    """Wall-clock time of the trial's process."""


class LocalExecutor:
    """Runs a study's trials through a trial server. `folder` keeps logs, prepared files and the compiler's cache."""

    def __init__(self, folder: Path, *, should_stop: Callable[[], bool] = lambda: False) -> None:
        self._folder = folder
        self._should_stop = should_stop
        self._replies: dict[Future[FinishedTrial], Future[Reply]] = {}

    @cached_property
    def _server(self) -> TrialServer:
        """Started when it is first needed: what is refused before costs no start."""
        return TrialServer(log_file=self._folder / "logs" / "server.log")

    @property
    def server_pid(self) -> int:
        return self._server.pid

    def probe(
        self, device: str | None, choices: Mapping[str, Sequence[Any]]
    ) -> tuple[DeviceInfo, dict[str, dict[str, str]]]:
        """The device, and which of `choices`, {technique: values}, do not work on it.

        None is the best device there is. Raises InvalidInput.
        """
        cache = self._folder / f"probe-{version('torch')}"
        payload = {"device": device, "choices": {technique: list(values) for technique, values in choices.items()}}
        found = self._call("probe", payload, environment=_compiler_cache(cache))
        return DeviceInfo(**found["device"]), found["unavailable"]

    def examine(
        self, workload: Workload, choices: Mapping[str, Sequence[Any]], *, device: str
    ) -> dict[str, dict[str, str]]:
        """Which of `choices`, {technique: values}, the workload's model cannot take on `device`.

        Raises InvalidInput.
        """
        listed = {technique: list(values) for technique, values in choices.items()}
        return dict(self._call("examine", {"workload": workload.to_dict(), "choices": listed, "device": device}))

    def model_sha256(self, workload: Workload) -> str:
        """SHA-256 of what the workload's model is made of today: Python file or weights. Raises InvalidInput."""
        return str(self._call("model_sha256", {"workload": workload.to_dict()}))

    def devices(self) -> list[DeviceInfo]:
        return [DeviceInfo(**info) for info in self._call("devices", {})]

    def prepare(self, workload: Workload, folder: Path) -> dict[str, Any]:
        """Writes token streams and initial weights into `folder`. Raises InvalidDataset."""
        return dict(self._call("prepare", {"workload": workload.to_dict(), "folder": str(folder.absolute())}))

    def prepare_seed(self, definition: StudyDefinition, workload: Workload, study_folder: Path) -> None:
        """Draws the initial weights of another seed for the study's text, where that was not done yet."""
        folder = study_folder / prepared_folder(definition.workload, workload)
        if not folder.exists():
            prepared = str((study_folder / PREPARED).absolute())
            payload = {"workload": workload.to_dict(), "prepared": prepared, "folder": str(folder.absolute())}
            self._call("prepare_seed", payload)

    def _call(self, task: str, payload: dict[str, Any], *, environment: dict[str, str] | None = None) -> Any:
        """Runs `task` and waits for what it returns. Raises Stopped when asked to stop meanwhile."""
        log_file = self._folder / "logs" / f"{task}.log"
        return self.wait_for(self._server.submit(task, payload, log_file=log_file, environment=environment)).result

    def wait_for(self, future: "Future[Reply]") -> Reply:
        """What a task returned. Raises the error it ended with, and Stopped when asked to stop meanwhile."""
        while True:
            try:
                return future.result(timeout=POLL_SECONDS)
            except NotYet:
                if self._should_stop():
                    self._server.cancel(future)
                    raise Stopped("the search was stopped", hint="the same command begins again") from None

    def submit_prediction(
        self,
        workload: Workload,
        config: TrainingConfig,
        *,
        device_type: str,
        torch_version: str | None = None,
        with_timeline: bool = False,
    ) -> "Future[Reply]":
        """Peak memory on fake tensors, without the device: a Prediction as JSON. Its error: PredictionImpossible."""
        payload = {
            "workload": workload.to_dict(),
            "config": config.to_dict(),
            "device": device_type,
            "torch_version": torch_version,
            "with_timeline": with_timeline,
        }
        folder = self._folder / "predictions"
        log_file = folder / f"{config.fingerprint}.log"
        return self._server.submit("predict", payload, log_file=log_file, environment=_compiler_cache(folder))

    def submit(
        self,
        definition: StudyDefinition,
        config: TrainingConfig,
        *,
        study_folder: Path,
        log_name: str,
        enforce_cap: bool,
        time_limit_seconds: float,
        workload: Workload | None = None,
        reference: ParityTrace | None = None,
        shares_perplexity: bool = False,
        rivals: Sequence[Rival] = (),
        keep_snapshot: bool = False,
    ) -> "Future[FinishedTrial]":
        """Trains `config` on the study's workload, or on `workload` in its place.

        The training must begin as `reference` does. `shares_perplexity`: only memory and speed are measured.
        It ends with the outcome `dominated` once one of `rivals` is seen to be better in both.
        `keep_snapshot` keeps torch's allocation history of the measured steps in the study's folder; CUDA only.
        """
        snapshot_file = study_folder / "snapshots" / f"{log_name}.pickle"
        payload = {
            **self._training(
                definition, config, workload or definition.workload, study_folder, enforce_cap=enforce_cap
            ),
            "reference": None if reference is None else reference.to_dict(),
            "shares_perplexity": shares_perplexity,
            "rivals": [asdict(rival) for rival in rivals],
            "snapshot_file": str(snapshot_file.absolute()) if keep_snapshot else None,
        }
        reply = self._submit_training(
            "train", payload, definition, study_folder, log_name=log_name, time_limit_seconds=time_limit_seconds
        )
        finished: Future[FinishedTrial] = Future()
        self._replies[finished] = reply
        reply.add_done_callback(lambda done: self._finish(done, finished))
        return finished

    def trace(
        self,
        definition: StudyDefinition,
        config: TrainingConfig,
        *,
        study_folder: Path,
        dropout: bool,
        time_limit_seconds: float,
    ) -> ParityTrace | str:
        """The first steps of `config`, beyond the cap if need be, or why there are none.

        Raises Stopped when asked to stop meanwhile.
        """
        payload = {
            **self._training(definition, config, definition.workload, study_folder, enforce_cap=False),
            "dropout": dropout,
        }
        reply = self._submit_training(
            "trace",
            payload,
            definition,
            study_folder,
            log_name=f"trace-{config.fingerprint}",
            time_limit_seconds=time_limit_seconds,
        )
        result = self.wait_for(reply).result
        if result.get("trace") is None:
            return str(result.get("failure") or result.get("message"))
        return ParityTrace.from_dict(result["trace"])

    def _training(
        self,
        definition: StudyDefinition,
        config: TrainingConfig,
        workload: Workload,
        study_folder: Path,
        *,
        enforce_cap: bool,
    ) -> dict[str, Any]:
        return {
            "workload": workload.to_dict(),
            "config": config.to_dict(),
            "folder": str((study_folder / prepared_folder(definition.workload, workload)).absolute()),
            "device": definition.device.device,
            "device_uuid": definition.device.uuid,
            "cap_bytes": definition.cap_bytes,
            "enforce_cap": enforce_cap,
            "requested_at": time.time(),
        }

    def _submit_training(
        self,
        task: str,
        payload: dict[str, Any],
        definition: StudyDefinition,
        study_folder: Path,
        *,
        log_name: str,
        time_limit_seconds: float,
    ) -> "Future[Reply]":
        return self._server.submit(
            task,
            payload,
            log_file=study_folder / "logs" / f"{log_name}.log",
            time_limit_seconds=time_limit_seconds,
            environment=_compiler_cache(study_folder),
            limit_host_memory=definition.device.type == "cpu",
        )

    def cancel(self, future: "Future[FinishedTrial]") -> None:
        """Kills the trial; its future then holds the outcome `interrupted`."""
        if reply := self._replies.get(future):
            self._server.cancel(reply)

    def shutdown(self) -> None:
        """Ends every trial and the server."""
        if "_server" in vars(self):
            self._server.close()

    def __enter__(self) -> "LocalExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _finish(self, reply: "Future[Reply]", finished: "Future[FinishedTrial]") -> None:
        self._replies.pop(finished, None)
        if error := reply.exception():
            finished.set_exception(error)
        else:
            result = reply.result()
            finished.set_result(FinishedTrial(measurement=Measurement(**result.result), seconds=result.seconds))


def _compiler_cache(folder: Path) -> dict[str, str]:
    """inductor's and Triton's disk caches, so that compilation times never come from another study's cache."""
    cache = (folder / "inductor").absolute()
    if any(character.isspace() for character in str(cache)):
        # inductor hands the path to the C++ compiler unquoted.
        cache = Path(gettempdir()) / f"autotune-inductor-{hashlib.sha256(str(cache).encode()).hexdigest()[:16]}"
    return {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
