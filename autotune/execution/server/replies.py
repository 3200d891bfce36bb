"""Reads what the process of a request writes to its pipe: lines of JSON.

`parse_line` takes one line, as bytes, and returns what it says; it raises MalformedReply for a line
of another shape, such as one that a user's script has written:

    {"phase": "compile"}                            what the process does now (`progress.py`)
    {"phase": "step", "steps": [12, 40]}            and how many of its steps have ended
    {"remark": "rank 1 was in ..."}                 what it was doing when the server ended it
    {"result": {...}, "error": null}                what its task returned; `RESULTS` has the types
    {"result": null, "error": {"kind": "TrialLost", "message": "...", "hint": "..."}}

The trial server reads the lines of its processes with it, and the client reads the server's replies
with `reply_of`. Does not import torch.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from autotune.errors import AutotuneError, Stopped, error_class
from autotune.spec.config import OptimizerFusion, Precision
from autotune.spec.limits import Count, Seconds, Work
from autotune.spec.parity import ParityTrace
from autotune.spec.prediction import Prediction
from autotune.spec.profile import Profile
from autotune.spec.reading import parse, shown
from autotune.spec.result import DeviceInfo, Measurement, Outcome
from autotune.spec.schema import Schema

MEASURED_TASKS = ("train", "train_in_turn")
"""Tasks whose failure is a Measurement."""
TRAININGS = (*MEASURED_TASKS, "trace", "profile")
"""Tasks that may clean up when they are ended; the others are killed at once."""

LARGEST_LINE_BYTES = 2**24
"""A longer line is not a reply; endless output must not fill the server's memory."""
LONGEST_TEXT = 4000
"""Characters of a message; the rest is cut off."""
_MESSAGES = ("message", "parity_message", "failure", "hint", "remark")

Phase = Literal["step", "evaluation", "parity", "compile", "waiting"]

_ERRORS_OF_TRAININGS = frozenset(("TrialLost", "DeviceDisturbed", "StudyMismatch"))
"""Kinds of errors of a training: everything else that goes wrong in it is its outcome. Most others
would end the search, and again each time that it goes on."""


class MalformedReply(Exception):
    """A line that no task writes; the text says what is wrong with it, without a full stop."""


@dataclass(frozen=True, kw_only=True)
class PhaseReport(Schema):
    """What a process does now."""

    phase: Phase
    steps: tuple[Count, Count] | None = None
    """How many steps have ended, of how many; None where that is not known."""


@dataclass(frozen=True, kw_only=True)
class LastSign:
    """What a process was doing when the server ended it."""

    text: str


@dataclass(frozen=True, kw_only=True)
class TaskError(Schema):
    """An error that a task ended with."""

    kind: str
    """Name of a subclass of AutotuneError in `autotune/errors.py`."""
    message: str
    hint: str

    def exception(self) -> AutotuneError:
        kind = error_class(self.kind)
        assert kind is not None
        return kind(self.message, hint=self.hint)


@dataclass(frozen=True, kw_only=True)
class TaskReply:
    """What a task ended with: a result, as JSON, or an error."""

    result: Any = None
    error: TaskError | None = None

    def to_dict(self) -> dict[str, Any]:
        error = None if self.error is None else vars(self.error)
        return {"result": self.result, "error": error}


def failure(error: AutotuneError) -> TaskReply:
    """Returns the reply of a task that ended with an error."""
    kind = type(error).__name__
    return TaskReply(error=TaskError(kind=kind, message=error.message, hint=error.hint))


def ended_as(measurement: Measurement, *, task: str) -> TaskReply:
    """Returns the reply for a process that has sent none, or none that is valid.

    A failure is the result of a training, and an error of any other task.
    """
    if task in MEASURED_TASKS:
        return TaskReply(result=asdict(measurement))
    if task == "trace" and measurement.outcome != "interrupted":
        why = {"failure": measurement.message, "outcome": measurement.outcome}
        return TaskReply(result={"trace": None, **why})
    error = TaskError(kind="ProcessEnded", message=measurement.message, hint="")
    return TaskReply(error=error)


def not_valid(error: MalformedReply, *, task: str, log_file: Path) -> TaskReply:
    """Returns the reply for a process that has written a malformed line."""
    message = f"its process wrote no valid reply: {error}; see {log_file}"
    return ended_as(Measurement(outcome="crashed", message=message), task=task)


# -- lines -----------------------------------------------------------------------------------------


class LineBuffer:
    """Makes lines of the bytes of a pipe, which come in parts of any size."""

    def __init__(self) -> None:
        self._unfinished = bytearray()

    def lines(self, data: bytes) -> list[bytes]:
        """Returns the lines that `data` ends, without their line feed.

        Raises MalformedReply for a line that is too long, before its end.
        """
        found: list[bytes] = []
        *ended, rest = data.split(b"\n")
        for part in ended:
            found.append(bytes(self._unfinished + part))
            self._unfinished.clear()
        self._unfinished += rest
        if len(self._unfinished) > LARGEST_LINE_BYTES:
            raise MalformedReply(f"a line is longer than {LARGEST_LINE_BYTES} bytes")
        return found


def parse_line(line: bytes, *, task: str) -> PhaseReport | LastSign | TaskReply:
    """Returns what a line says that the process of `task` has written. Raises MalformedReply."""
    message = decode(line)
    if isinstance(message.get("remark"), str):
        return LastSign(text=message["remark"])
    if "phase" in message:
        return phase_of(message)
    return reply_of(message, task=task)


def decode(line: bytes) -> dict[str, Any]:
    """Returns the JSON object of a line, with texts that can be printed and stored.

    A number that is not finite was not measured: it is None. Raises MalformedReply.
    """
    try:
        message = _mended(json.loads(line, parse_constant=lambda name: None))
    except (ValueError, RecursionError):  # also UnicodeDecodeError, and integers without end
        raise MalformedReply(f"{shown(line)} is not JSON") from None
    if not isinstance(message, dict):
        raise MalformedReply(f"{shown(line)} is not a JSON object")
    return message


def phase_of(message: Mapping[str, Any]) -> PhaseReport:
    """Returns the phase that a line reports. Raises MalformedReply."""
    try:
        return parse(PhaseReport, message, ignore_unknown=True)
    except ValueError as error:
        raise MalformedReply(str(error)) from None


def reply_of(message: Mapping[str, Any], *, task: str) -> TaskReply:
    """Returns what a task ended with. Raises MalformedReply.

    The result of a task that `RESULTS` lacks, as those of a test, may be anything.
    """
    if not {"result", "error"} <= message.keys():
        raise MalformedReply(f"{shown(dict(message))} has no result and no error")
    result = message["result"]
    try:
        if message["error"] is not None:
            return TaskReply(error=_error_of(message["error"], task=task))
        if task in RESULTS:
            parse(RESULTS[task], result)
    except (ValueError, AutotuneError) as error:
        raise MalformedReply(f"the reply of {task}: {error}") from None
    return TaskReply(result=result)


def _error_of(value: Any, *, task: str) -> TaskError:
    error = parse(TaskError, value)
    kind = error_class(error.kind)
    is_known = kind is not None and not issubclass(kind, Stopped)
    if not is_known or (task in MEASURED_TASKS and error.kind not in _ERRORS_OF_TRAININGS):
        raise ValueError(f"{shown(error.kind)} is not an error that it ends with")
    return error


def _mended(value: Any) -> Any:
    """Returns the value with texts that have no lone surrogates and no NUL, and short messages.

    Names, such as the paths of files, stay as they are.
    """
    if isinstance(value, dict):
        mended = {name: _mended(item) for name, item in value.items()}
        for name in _MESSAGES:
            message = mended.get(name)
            if isinstance(message, str) and len(message) > LONGEST_TEXT:
                mended[name] = message[: LONGEST_TEXT - 1] + "…"
        return mended
    if isinstance(value, list):
        return [_mended(item) for item in value]
    if isinstance(value, str):
        return value.encode(errors="replace").decode().replace("\0", "\ufffd")
    return value


# -- results ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Training(Measurement):
    """What a training measures; of a user's code also {path: SHA-256} of its files."""

    script_files: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Tracing(Schema):
    """What `trace` finds: the first steps, or why there are none."""

    trace: ParityTrace | None
    failure: str
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class Profiling(Schema):
    """What `profile` finds: the profile, or why there is none."""

    profile: Profile | None
    failure: str


@dataclass(frozen=True, kw_only=True)
class Probe(Schema):
    """What `probe` finds: the device, and the choices that do not work on it, with reasons."""

    device: DeviceInfo
    unavailable: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class Peaks(Schema):
    """What `measure_peaks` measures: fields of `DeviceInfo`."""

    matrix_flops_per_second: Mapping[str, Work]
    layer_flops_per_second: Mapping[str, Work]
    bandwidth_bytes_per_second: Work | None
    operator_seconds: Seconds | None


@dataclass(frozen=True, kw_only=True)
class Examination(Schema):
    """What `examine` finds.

    For a user's code: also its files and packages. For a script: also its precision, how its
    optimizers update, and the environment variable that is missing.
    """

    unavailable: Mapping[str, Mapping[str, str]]
    files: Mapping[str, str] | None = None
    packages: Mapping[str, str] | None = None
    own_precision: Precision | None = None
    own_fusion: OptimizerFusion | None = None
    missing_variable: str | None = None


@dataclass(frozen=True, kw_only=True)
class Prepared(Schema):
    """What `prepare` has written: hashes of the text and the model, and what it counted."""

    text_sha256: str
    model_sha256: str
    chat_column: str | None
    parameters: Count | None


RESULTS: Mapping[str, Any] = {
    "prepare": Prepared,
    "identify": DeviceInfo,
    "probe": Probe,
    "measure_peaks": Peaks,
    "examine": Examination,
    "rehearse": str,
    "model_sha256": str,
    "devices": list[DeviceInfo],
    "check_device": dict[str, str],
    "predict": Prediction,
    "train": Training,
    "train_in_turn": Training,
    "trace": Tracing,
    "profile": Profiling,
    "prepare_seed": dict[str, str],
}
"""The type of the result of each task of `tasks.py`, which is passed on as JSON."""
