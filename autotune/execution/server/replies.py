"""Reads what the process of a request writes to its pipe: lines of JSON.

`parse_line` takes one line, as bytes, and returns what it says; it raises MalformedReply for a line
of another shape, such as one that a user's script has written:

    {"phase": "compile"}                            what it does now (`process/progress.py`)
    {"phase": "step", "steps": [12, 40]}            and how many of its steps have ended
    {"remark": "rank 1 was in ..."}                 what it was doing when the server ended it
    {"result": {...}, "error": null}                what its task (`execution/tasks.py`) answers
    {"result": null, "error": {"kind": "TrialLost", "message": "...", "hint": "..."}}
    {"result": null, "error": null, "ended": {"outcome": "out_of_memory", ...}}

The trial server reads the lines of its processes with it, and the client reads the server's replies
with `reply_of`: the same with `seconds`, and with `ended` also for a process that has sent nothing
valid. Does not import torch.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from autotune.errors import AutotuneError, Stopped, error_class
from autotune.spec.limits import Count, Seconds
from autotune.spec.reading import parse, shown
from autotune.spec.result import Measurement
from autotune.spec.schema import Schema

LARGEST_LINE_BYTES = 2**24
"""A longer line is not a reply; endless output must not fill the server's memory."""
LONGEST_TEXT = 4000
"""Characters of a message; the rest is cut off."""
_MESSAGES = ("message", "parity_message", "hint", "remark")

Phase = Literal["step", "evaluation", "parity", "compile", "waiting"]


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
class TaskReply(Schema):
    """What a task ended with: a result, as JSON, or an error, or the end of its process."""

    result: Any = None
    error: TaskError | None = None
    ended: Measurement | None = None
    seconds: Seconds | None = None
    """Wall-clock time of its process, where its server says it."""


def failure(error: AutotuneError) -> TaskReply:
    """Returns the reply of a task that ended with an error."""
    kind = type(error).__name__
    return TaskReply(error=TaskError(kind=kind, message=error.message, hint=error.hint))


class TrainingFailed(Exception):
    """A training has ended with an outcome that is a failure."""

    def __init__(self, ending: Measurement) -> None:
        super().__init__(ending.message or ending.outcome)
        self.ending = ending


def reply_after(run: Callable[[], Any]) -> TaskReply:
    """Returns the reply of a task that returns, fails or raises an error as `run` does."""
    try:
        return TaskReply(result=run())
    except TrainingFailed as failed:
        return TaskReply(ended=failed.ending)
    except AutotuneError as error:
        return failure(error)


def of_malformed(error: MalformedReply, *, log_file: Path) -> Measurement:
    """Returns how a process has ended that has written a malformed line."""
    message = f"its process wrote no valid reply: {error}; see {log_file}"
    return Measurement(outcome="crashed", message=message)


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


def parse_line(line: bytes) -> PhaseReport | LastSign | TaskReply:
    """Returns what a line says that a process has written. Raises MalformedReply."""
    message = decode(line)
    if isinstance(message.get("remark"), str):
        return LastSign(text=message["remark"])
    if "phase" in message:
        return phase_of(message)
    return reply_of(message)


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


def reply_of(message: Mapping[str, Any]) -> TaskReply:
    """Returns what a task ended with; its result is not checked. Raises MalformedReply."""
    if not {"result", "error"} <= message.keys():
        raise MalformedReply(f"{shown(dict(message))} has no result and no error")
    try:
        reply = parse(TaskReply, message, ignore_unknown=True)
    except ValueError as error:
        raise MalformedReply(str(error)) from None
    kind = None if reply.error is None else error_class(reply.error.kind)
    if reply.error is not None and (kind is None or issubclass(kind, Stopped)):
        raise MalformedReply(f"{shown(reply.error.kind)} is not an error that a task ends with")
    return reply


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


def line_of(message: Mapping[str, Any]) -> bytes:
    """Returns a line of JSON; a dataclass in the message is its fields, and a path its text."""
    return json.dumps(message, default=_as_json).encode() + b"\n"


def _as_json(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else asdict(value)


def write_line(pipe: int, message: Mapping[str, Any]) -> None:
    """Writes a line of JSON to a descriptor."""
    data = line_of(message)
    while data:
        data = data[os.write(pipe, data) :]
