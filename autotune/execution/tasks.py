"""The tasks of a trial server: what each is asked, and what it answers. Does not import torch.

A task is one class. Its fields are the request, which crosses as JSON to a forked process, where
`server/tasks.py` carries it out. `answer` is the type of what comes back as JSON, and `value_of`
makes of it, or of how the process has ended, what the caller gets or the error that it sees.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from autotune.errors import AutotuneError, ProcessEnded
from autotune.execution.server.replies import (
    MalformedReply,
    TaskReply,
    of_malformed,
    reply_of,
)
from autotune.spec.attempt import FinishedTrial
from autotune.spec.config import Precision
from autotune.spec.examined import Examined
from autotune.spec.limits import Count
from autotune.spec.parity import NoTrace, ParityTrace
from autotune.spec.prediction import Prediction, PredictionRequest
from autotune.spec.profile import Profile
from autotune.spec.reading import parse, shown
from autotune.spec.result import DeviceInfo, Measurement
from autotune.spec.schema import Schema
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import LinearShape, Workload

R = TypeVar("R")

Choices = Mapping[str, Sequence[Any]]
"""Values by the name of their technique."""


@dataclass(frozen=True, kw_only=True)
class Task(Schema, Generic[R]):
    """A request to a trial server; a caller gets an `R`, or the AutotuneError of the task."""

    name: ClassVar[str]
    """That of the class, as requests and logs have it."""
    answer: ClassVar[Any]
    is_training: ClassVar[bool] = False
    """Whether it reports what it does and cleans up when it is ended; others are killed at once."""
    rests: ClassVar[bool] = False
    """Whether its process stands still while a training of the same server is timed."""
    most_seconds: ClassVar[float | None] = None
    """Its time limit where the caller gives none; None: there is no limit."""

    def __init_subclass__(cls) -> None:
        cls.name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()

    @property
    def log_name(self) -> str:
        """Name of its log, where the caller gives none."""
        return self.name

    @property
    def limits_host_memory(self) -> bool:
        """Whether it shall fail, and not the machine, where the host has no more memory."""
        return False

    def folder_in(self, folder: Path) -> Path:
        """Returns where its log and its cache of compiled code are, given the executor's folder."""
        return folder

    def value_of(self, reply: TaskReply) -> R:
        """Returns what the caller gets. Raises the task's error, and MalformedReply."""
        if reply.ended is not None:
            return self.value_of_end(reply.ended, seconds=reply.seconds or 0.0)
        if reply.error is not None:
            raise reply.error.exception()
        try:
            value: R = parse(self.answer, reply.result)
        except (ValueError, AutotuneError) as error:
            raise MalformedReply(f"the reply of {self.name}: {error}") from None
        return value

    def value_of_end(self, ending: Measurement, *, seconds: float) -> R:
        """Returns what the caller gets where its process has ended without an answer."""
        raise ProcessEnded(ending.message)


def value_of(message: Mapping[str, Any], task: Task[R], *, log_file: Path) -> R:
    """Returns what the caller of a task gets for the reply of its server.

    Raises the error that the task ended with.
    """
    try:
        return task.value_of(reply_of(message))
    except MalformedReply as error:
        return task.value_of_end(of_malformed(error, log_file=log_file), seconds=0.0)


# -- devices ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Identify(Task[DeviceInfo]):
    """Say what a device is, without a CUDA context on it. Raises InvalidInput."""

    answer = DeviceInfo

    device: str | None
    """None is the first CUDA device, else the CPU."""


@dataclass(frozen=True, kw_only=True)
class ListDevices(Task[Sequence[DeviceInfo]]):
    """List every device that torch can use: the CUDA devices, then the CPU.

    There is no CUDA context on them. Where CUDA does not start, the CPU is the only one.
    """

    answer = list[DeviceInfo]


@dataclass(frozen=True, kw_only=True)
class Probed(Schema):
    """A device, and {technique: {value: reason}} of the choices that do not work on it."""

    device: DeviceInfo
    unavailable: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class Probe(Task[Probed]):
    """Find out which choices work on a device; what worked before is tried again only if `anew`.

    Raises InvalidInput, and AutotuneError for a torch on which no trial could run.
    """

    answer = Probed

    device: str
    choices: Choices
    with_context: bool
    """Whether to measure the size of a new CUDA context, too."""
    anew: bool = False

    def folder_in(self, folder: Path) -> Path:
        return folder / f"probe-{version('torch')}"


@dataclass(frozen=True, kw_only=True)
class MeasurePeaks(Task[DeviceInfo]):
    """Measure the rates of matrix products and of copies of a device, and of its host.

    The answer is the device with them.
    """

    answer = DeviceInfo

    device: DeviceInfo
    precisions: Sequence[Precision]
    shape: LinearShape | None


@dataclass(frozen=True, kw_only=True)
class CheckDevice(Task[None]):
    """Run a tiny computation on a device; fails where the device does.

    Creating a context takes seconds, longer with many devices.
    """

    answer = None
    most_seconds = 60.0

    device: str


# -- the model and the files of a study ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Examine(Task[Examined]):
    """Find out which choices a model supports. Raises InvalidInput for one that is not built."""

    answer = Examined

    workload: Workload
    choices: Choices
    device: str
    learns_global_batch: bool = False
    """Whether a script may have another global batch than the workload."""


@dataclass(frozen=True, kw_only=True)
class Rehearse(Task[str]):
    """Say why a script has no such micro batch; empty if it has.

    With the whole global batch: why its optimizer cannot step during backward. It takes the start
    of the script and one or two plain steps.
    """

    answer = str
    most_seconds = 600.0

    workload: Workload
    micro_batch_size: int
    device: str

    @property
    def limits_host_memory(self) -> bool:
        return not self.device.startswith("cuda")


@dataclass(frozen=True, kw_only=True)
class ModelSha256(Task[str]):
    """Return the SHA-256 of the model's Python file, script or trained weights.

    Empty for a model that its config.json describes completely. Raises InvalidInput.
    """

    answer = str

    workload: Workload


@dataclass(frozen=True, kw_only=True)
class Prepared(Schema):
    """Hashes of the text and the model that were prepared, and what was counted."""

    text_sha256: str
    model_sha256: str
    chat_column: str | None
    prompt_format: Mapping[str, Any] | None
    """The fields of the format by which columns are put into prompts."""
    parameters: Count | None


@dataclass(frozen=True, kw_only=True)
class Prepare(Task[Prepared]):
    """Write tokens and initial weights into a folder, all or nothing.

    Raises InvalidDataset, and InvalidInput for an invalid model or tokenizer.
    """

    answer = Prepared

    workload: Workload
    folder: Path


@dataclass(frozen=True, kw_only=True)
class PrepareSeed(Task[None]):
    """Make a folder with the text of `prepared` and the initial weights of the workload's seed."""

    answer = None

    workload: Workload
    prepared: Path
    folder: Path


# -- one configuration -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Predict(Task[Prediction]):
    """Predict peak memory on fake tensors, in a process without a GPU.

    Raises PredictionImpossible. It has a limit because building a model may hang, too.
    """

    answer = Prediction
    rests = True
    most_seconds = 1800.0

    request: PredictionRequest

    @property
    def log_name(self) -> str:
        return self.request.config.fingerprint

    def folder_in(self, folder: Path) -> Path:
        return folder / "predictions"


@dataclass(frozen=True, kw_only=True)
class TrainingTask(Task[R]):
    """A training, whose files are in the study's folder.

    Raises TrialLost for a failure of the machine, and StudyMismatch where the study's text, model
    or script has changed.
    """

    is_training = True

    training: TrainingRequest

    @property
    def ranks(self) -> int:
        """How many processes train, on all nodes together."""
        return self.training.workload.devices_per_trial

    @property
    def limits_host_memory(self) -> bool:
        return not self.training.device.startswith("cuda")

    def folder_in(self, folder: Path) -> Path:
        return self.training.folder.parent


_ERRORS_OF_TRIALS = frozenset(("TrialLost", "DeviceDisturbed", "StudyMismatch"))
"""Kinds of errors of a trial: everything else that goes wrong in it is its outcome. Most others
would end the search, and again each time that it goes on."""


@dataclass(frozen=True, kw_only=True)
class Train(TrainingTask[FinishedTrial]):
    """Train a configuration; one that fails is measured as that."""

    answer = FinishedTrial

    def value_of(self, reply: TaskReply) -> FinishedTrial:
        error = reply.error
        if error is not None and error.kind == "PreparationFailed":
            # As where a script has replaced what we use.
            text = f"{error.message}; {error.hint}"
            ending = Measurement(outcome="crashed", message=text)
            return self.value_of_end(ending, seconds=reply.seconds or 0.0)
        if error is not None and error.kind not in _ERRORS_OF_TRIALS:
            raise MalformedReply(f"{shown(error.kind)} is not an error that it ends with")
        finished = super().value_of(reply)
        return replace(
            finished,
            measurement=self._with_devices(finished.measurement),
            seconds=finished.seconds if reply.seconds is None else reply.seconds,
        )

    def value_of_end(self, ending: Measurement, *, seconds: float) -> FinishedTrial:
        return FinishedTrial(measurement=self._with_devices(ending), seconds=seconds)

    def _with_devices(self, measurement: Measurement) -> Measurement:
        return replace(measurement, devices=self.training.workload.devices_per_trial)


@dataclass(frozen=True, kw_only=True)
class TrainInTurn(Train):
    """Train a configuration while the search lets it, which gets the time of its steps.

    Only the outcome is measured.
    """

    address: str
    """Where it takes its turns (`training/turns.py`)."""


@dataclass(frozen=True, kw_only=True)
class Trace(TrainingTask[ParityTrace | NoTrace]):
    """Run the first steps of a configuration."""

    answer = ParityTrace | NoTrace

    dropout: bool

    @property
    def ranks(self) -> int:
        """As of every training; the plain one, with which others are compared, has one process."""
        config = self.training.config
        is_plain = config.sharding == "none" and config.tensor_parallel == 1
        return 1 if is_plain else super().ranks

    def value_of_end(self, ending: Measurement, *, seconds: float) -> ParityTrace | NoTrace:
        if ending.outcome == "interrupted":
            raise ProcessEnded(ending.message)
        return NoTrace(outcome=ending.outcome, message=ending.message or ending.outcome)


@dataclass(frozen=True, kw_only=True)
class ProfileTraining(TrainingTask[Profile]):
    """Profile steps of a configuration, and write files to `folder`. Raises StorageUnavailable."""

    answer = Profile

    steps: int
    folder: Path

    def value_of_end(self, ending: Measurement, *, seconds: float) -> Profile:
        raise ProcessEnded(
            f"the training that was to be profiled has failed: {ending.message or ending.outcome}",
            hint=f"see the log in {self.training.folder.parent / 'logs'}",
        )
