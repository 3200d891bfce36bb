"""Checks what the process of a request writes to its pipe: lines of JSON from untrusted code.

A trial runs a user's script or model, which can write anything to the pipe. `parse_line` takes one
line, as bytes, and returns what it says, or raises MalformedReply, and nothing else:

    {"phase": "compile"}                            what the process does now (`progress.py`)
    {"phase": "step", "steps": [12, 40]}            and how many of its steps have ended
    {"remark": "rank 1 was in ..."}                 what it was doing when the server ended it
    {"result": {...}, "error": null}                what its task returned; `RESULTS` has the types
    {"result": null, "error": {"kind": "TrialLost", "message": "...", "hint": "..."}}

The trial server checks the lines of its processes with it, and the client, which cannot know who
has written to the server's pipe, checks the server's replies with `reply_of`. Does not import
torch.
"""

import json
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from autotune.errors import AutotuneError, Stopped, error_class
from autotune.spec.config import OptimizerFusion, Precision
from autotune.spec.limits import Count, Work
from autotune.spec.parity import PARITY_STEPS, PROJECTIONS, NoTrace, ParityTrace
from autotune.spec.prediction import Prediction
from autotune.spec.profile import Profile
from autotune.spec.reading import check, fits, parse
from autotune.spec.result import DeviceInfo, Measurement
from autotune.spec.schema import Schema

MEASURED_TASKS = ("train", "train_in_turn")
"""Tasks whose failure is a Measurement."""
TRAININGS = (*MEASURED_TASKS, "trace", "profile")
"""Tasks that may clean up when they are ended; the others are killed at once."""

LARGEST_LINE_BYTES = 2**24
"""A longer line is not a reply; endless output must not fill the server's memory."""
LONGEST_TEXT = 4000
"""Characters of a message; the rest is cut off."""
_DEEPEST = 32
"""Most JSON objects and lists within each other."""
_LARGEST_NUMBER = 2**63 - 1
"""What a column of a database holds; no size in bytes is larger."""

Phase = Literal["step", "evaluation", "parity", "compile", "waiting"]
_PHASES = frozenset(get_args(Phase))

_ERRORS_OF_TRAININGS = frozenset(("TrialLost", "DeviceDisturbed", "StudyMismatch"))
"""Kinds of errors of a training: everything else that goes wrong in it is its outcome. Most others
would end the search, and again each time that it goes on."""


class MalformedReply(Exception):
    """A line that no task writes; the text says what is wrong with it, without a full stop."""


@dataclass(frozen=True, kw_only=True)
class PhaseReport:
    """What a process does now."""

    phase: Phase
    steps: tuple[int, int] | None = None
    """How many steps have ended, of how many; None where that is not known."""


@dataclass(frozen=True, kw_only=True)
class Remark:
    """What a process was doing when the server ended it."""

    text: str


@dataclass(frozen=True, kw_only=True)
class TaskError:
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
        self._is_too_long = False
        """Whether the rest of the line is thrown away."""

    def lines(self, data: bytes) -> list[bytes]:
        """Returns the lines that `data` ends, without their line feed.

        A line that is too long is returned once, cut off, which `decode` then rejects.
        """
        found: list[bytes] = []
        *ended, rest = data.split(b"\n")
        for part in ended:
            self._add(part, found)
            if not self._is_too_long:
                found.append(bytes(self._unfinished))
            self._unfinished.clear()
            self._is_too_long = False
        self._add(rest, found)
        return found

    def _add(self, part: bytes, found: list[bytes]) -> None:
        if self._is_too_long:
            return
        self._unfinished += part
        if len(self._unfinished) > LARGEST_LINE_BYTES:
            self._is_too_long = True
            found.append(bytes(self._unfinished))
            self._unfinished.clear()


def parse_line(line: bytes, *, task: str) -> PhaseReport | Remark | TaskReply:
    """Returns what a line says that the process of `task` has written. Raises MalformedReply."""
    message = decode(line)
    if isinstance(message.get("remark"), str):
        return Remark(text=_text(message["remark"]))
    if "phase" in message:
        report = phase_of(message)
        if report.phase == "waiting" and task != "train_in_turn":
            raise MalformedReply(f"{task} has no turn to wait for")
        return report
    reply = reply_of(message, task=task)
    if task in MEASURED_TASKS and reply.error is None and reply.result["outcome"] == "interrupted":
        raise MalformedReply("only the server interrupts a training")
    return reply


def decode(line: bytes) -> dict[str, Any]:
    """Returns the JSON object of a line. Raises MalformedReply."""
    if len(line) > LARGEST_LINE_BYTES:
        raise MalformedReply(f"a line is longer than {LARGEST_LINE_BYTES} bytes")
    try:
        message = json.loads(line)
        _check_bounds(message)
    except (ValueError, RecursionError):  # also UnicodeDecodeError, and integers without end
        raise MalformedReply(f"{_shown(line)} is not JSON") from None
    if not isinstance(message, dict):
        raise MalformedReply(f"{_shown(line)} is not a JSON object")
    return message


def phase_of(message: Mapping[str, Any]) -> PhaseReport:
    """Returns the phase that a line reports. Raises MalformedReply."""
    phase = message.get("phase")
    if not isinstance(phase, str) or phase not in _PHASES:
        raise MalformedReply(f"{_shown(phase)} is not a phase")
    steps = message.get("steps")
    if steps is None:
        return PhaseReport(phase=phase)  # type: ignore[arg-type]  # it is one of the literal's
    is_pair = isinstance(steps, list) and len(steps) == 2 and all(type(n) is int for n in steps)
    if not is_pair or min(steps) < 0:
        raise MalformedReply(f"{_shown(steps)} is not a number of steps of another")
    return PhaseReport(phase=phase, steps=(steps[0], steps[1]))  # type: ignore[arg-type]


def reply_of(message: Mapping[str, Any], *, task: str) -> TaskReply:
    """Returns what a task ended with. Raises MalformedReply.

    The result of a task that `RESULTS` lacks, as those of a test, may be anything.
    """
    if not {"result", "error"} <= message.keys():
        raise MalformedReply(f"{_shown(dict(message))} has no result and no error")
    if message["error"] is not None:
        if message["result"] is not None:
            raise MalformedReply("it has a result and an error")
        return TaskReply(error=_error_of(message["error"], task=task))
    check = RESULTS.get(task)
    if check is None:
        return TaskReply(result=message["result"])
    try:
        return TaskReply(result=check(message["result"]))
    except KeyError as error:
        raise MalformedReply(f"the result of {task} has no {error}") from None
    except (TypeError, ValueError, AttributeError, AutotuneError) as error:
        raise MalformedReply(f"the result of {task}: {_text(str(error), longest=200)}") from None


def _error_of(error: Any, *, task: str) -> TaskError:
    parts = ("kind", "message", "hint")
    if not isinstance(error, dict) or not all(isinstance(error.get(part), str) for part in parts):
        raise MalformedReply(f"{_shown(error)} is not an error")
    kind = error_class(error["kind"])
    is_known = kind is not None and not issubclass(kind, Stopped)
    if not is_known or (task in MEASURED_TASKS and error["kind"] not in _ERRORS_OF_TRAININGS):
        raise MalformedReply(f"{_shown(error['kind'])} is not an error that {task} ends with")
    return TaskError(kind=error["kind"], message=_text(error["message"]), hint=_text(error["hint"]))


# -- values ----------------------------------------------------------------------------------------


def _check_bounds(value: Any) -> None:
    """Raises ValueError for values that are nested too deeply, and for too large integers."""
    level = [value]
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                below.extend(one.values())
            elif isinstance(one, list):
                below.extend(one)
            elif isinstance(one, int) and not -_LARGEST_NUMBER <= one <= _LARGEST_NUMBER:
                raise ValueError("an integer is too large")
        if not below:
            return
        level = below
    raise ValueError("values are nested too deeply")


def _text(text: str, *, longest: int = LONGEST_TEXT) -> str:
    """Returns a text that can be printed and stored: no lone surrogates, no NUL, not too long."""
    clean = text[: longest + 1].encode(errors="replace").decode().replace("\0", "\ufffd")
    return clean if len(clean) <= longest else clean[: longest - 1] + "…"


def _shown(value: Any) -> str:
    """Returns a short text for a value of any size."""
    return _text(reprlib.repr(value), longest=80)


# -- results ---------------------------------------------------------------------------------------


def _training(result: Any) -> dict[str, Any]:
    """Returns the Measurement of a training; a number that is not finite was not measured."""
    values: dict[str, Any] = {}
    for name, value in _object(result).items():
        is_not_finite = isinstance(value, float) and not math.isfinite(value)
        values[name] = None if is_not_finite else value
    script_files = values.pop("script_files", None)
    for name in ("message", "parity_message", "peak_phase"):
        if isinstance(values.get(name), str):
            values[name] = _text(values[name])
    _check_training(parse(Measurement, values))
    if script_files is not None:
        if not fits(dict[str, str], script_files):
            raise ValueError(f"script_files is {_shown(script_files)}")
        values["script_files"] = script_files
    return values


def _check_training(measurement: Measurement) -> None:
    """Raises ValueError for what no training measures."""
    if measurement.outcome == "predicted_over_cap":
        raise ValueError("a training predicts nothing")
    if measurement.reused_from is not None or measurement.shares_perplexity:
        raise ValueError("a training does not know another trial")
    if measurement.perplexity_source is not None and measurement.perplexity_source.seeds != 1:
        raise ValueError("a training has one seed")
    if measurement.was_trained and 0 in (measurement.peak_memory_bytes, measurement.device_bytes):
        raise ValueError("it was trained in no memory")


def _trace(result: Any) -> dict[str, Any]:
    result = _object(result)
    if result["trace"] is None:
        missing = NoTrace(
            outcome=result["outcome"], message=_text(_string(result["failure"], "failure"))
        )
        check(missing)
        return {"trace": None, "failure": missing.message, "outcome": missing.outcome}
    trace = parse(ParityTrace, result["trace"])
    if not 1 <= len(trace.losses) <= PARITY_STEPS:
        raise ValueError(f"it has the losses of {len(trace.losses)} steps")
    if trace.gradient_norms.keys() != trace.gradient_projections.keys():
        raise ValueError("its norms and its projections are of different blocks")
    projected = [
        *trace.gradient_projections.values(),
        *trace.update_projections.values(),
        *trace.buffer_projections.values(),
        trace.average_projections or (0.0,) * PROJECTIONS,
    ]
    if any(len(values) != PROJECTIONS for values in projected):
        raise ValueError(f"a gradient or a change does not have {PROJECTIONS} projections")
    return {"trace": result["trace"], "failure": "", "outcome": "ok"}


def _profile(result: Any) -> dict[str, Any]:
    result = _object(result)
    if result["profile"] is None:
        return {"profile": None, "failure": _text(_string(result["failure"], "failure"))}
    parse(Profile, result["profile"])
    return {"profile": result["profile"], "failure": ""}


def _prediction(result: Any) -> dict[str, Any]:
    parse(Prediction, result)
    return dict(result)


def _device(result: Any) -> dict[str, Any]:
    device = parse(DeviceInfo, result)
    if device.total_memory_bytes == 0:
        raise ValueError("total_memory_bytes is 0")
    return dict(result)


def _devices(result: Any) -> list[dict[str, Any]]:
    if not isinstance(result, list) or not result:
        raise ValueError(f"{_shown(result)} is not a list of devices")
    return [_device(one) for one in result]


@dataclass(frozen=True, kw_only=True)
class Probe(Schema):
    """What `probe` finds: the device, and the choices that do not work on it, with reasons."""

    device: DeviceInfo
    unavailable: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class Peaks(Schema):
    """What `measure_peaks` measures: fields of `DeviceInfo`."""

    matrix_flops_per_second: Mapping[str, Work]
    bandwidth_bytes_per_second: Work | None


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


def _probe(result: Any) -> dict[str, Any]:
    found = parse(Probe, result)
    return {
        "device": _device(result["device"]),
        "unavailable": _unavailable(found.unavailable),
    }


def _examination(result: Any) -> dict[str, Any]:
    found = parse(Examination, result)
    return {**result, "unavailable": _unavailable(found.unavailable)}


def _unavailable(found: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    return {
        technique: {choice: _text(why) for choice, why in reasons.items()}
        for technique, reasons in found.items()
    }


def _nothing(result: Any) -> dict[str, Any]:
    if result != {}:
        raise ValueError(f"{_shown(result)} is not empty")
    return {}


def _sentence(result: Any) -> str:
    return _text(_string(result, "it"))


def _object(result: Any) -> dict[str, Any]:
    if not isinstance(result, dict):
        raise ValueError(f"{_shown(result)} is not an object")
    return result


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {_shown(value)}")
    return value


RESULTS: Mapping[str, Callable[[Any], Any]] = {
    "prepare": lambda result: asdict(parse(Prepared, result)),
    "identify": _device,
    "probe": _probe,
    "measure_peaks": lambda result: asdict(parse(Peaks, result)),
    "examine": _examination,
    "rehearse": _sentence,
    "model_sha256": _sentence,
    "devices": _devices,
    "check_device": _nothing,
    "predict": _prediction,
    "train": _training,
    "train_in_turn": _training,
    "trace": _trace,
    "profile": _profile,
    "prepare_seed": _nothing,
}
"""Returns the checked result of each task of `tasks.py`; raises what `reply_of` catches."""
