"""Border of the trials: a line that the process of a trial, which runs a user's code, has written.

An input is the name of a task on a line of its own, which the server knows, and the line.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hypothesis import strategies

from autotune.errors import AutotuneError
from autotune.execution.server.replies import (
    LastSign,
    MalformedReply,
    PhaseReport,
    decode,
    line_of,
    parse_line,
    reply_of,
)
from autotune.execution.tasks import (
    Examine,
    Identify,
    ListDevices,
    Predict,
    Prepare,
    Probe,
    Rehearse,
    Task,
    Trace,
    Train,
)
from autotune.reporting.trial_text import outcome_line
from autotune.spec.attempt import FinishedTrial
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Prediction, PredictionRequest
from autotune.spec.result import Measurement, TrialRecord
from autotune.spec.training_request import TrainingRequest
from autotune.storage.rows import measurement_from_values, measurement_values
from tests.building.results import study_result
from tests.building.studies import MIB, definition, measured
from tests.building.views import predicted
from tests.fuzzing.judging import Border, Reader
from tests.fuzzing.mutations import changed_files, json_bytes
from tests.fuzzing.showing import shown

_DEVICE = asdict(definition().device)
_TRACE = {
    "losses": [5.5, 5.4],
    "draws_random_numbers": False,
    "gradient_norms": {"blocks.0": 1.5},
    "gradient_projections": {"blocks.0": [0.5, -0.5, 1.0, 2.0] * 2},
    "group_settings": {"lr of group 0": [0.1, 0.1]},
    "update_projections": {"blocks.0": [0.5, -0.5, 1.0, 2.0] * 2},
}
_MEASURED = asdict(
    measured(peak_phase="backward", bytes_by_kind={"parameters": 10}, bits_per_byte=2.5)
)
_CRASHED = asdict(Measurement(outcome="crashed", message="it ended"))
_TRAINED = {"measurement": _MEASURED, "seconds": 1.0, "script_files": {"train.py": "f" * 64}}
_RESULTS: tuple[tuple[str, Any], ...] = (
    ("train", {"measurement": _MEASURED, "seconds": 1.0}),
    ("train", {"measurement": _CRASHED, "seconds": 1.0}),
    ("train", _TRAINED),
    ("predict", predicted(peak=100 * MIB).to_dict()),
    ("probe", {"device": _DEVICE, "unavailable": {"precision": {"tf32": "no TF32"}}}),
    ("identify", _DEVICE),
    ("list_devices", [_DEVICE]),
    (
        "examine",
        {"unavailable": {}, "files": {"train.py": "f" * 64}, "missing_variable": ""},
    ),
    (
        "prepare",
        {
            "text_sha256": "f" * 64,
            "model_sha256": "",
            "parameters": 1000,
            "chat_column": None,
            "prompt_format": None,
        },
    ),
    ("rehearse", "two steps"),
    ("trace", _TRACE),
)
_WORKLOAD, _CONFIG = definition().workload, TrainingConfig()
_TRAINING = TrainingRequest(
    workload=_WORKLOAD, config=_CONFIG, folder=Path("prepared"), device="cpu", cap_bytes=MIB
)
_TASKS: dict[str, Task[Any]] = {
    task.name: task
    for task in (
        Train(training=_TRAINING),
        Trace(training=_TRAINING, dropout=False),
        Predict(request=PredictionRequest(workload=_WORKLOAD, config=_CONFIG, device="cpu")),
        Probe(device="cpu", choices={}, with_context=False),
        Identify(device="cpu"),
        ListDevices(),
        Examine(workload=_WORKLOAD, choices={}, device="cpu"),
        Prepare(workload=_WORKLOAD, folder=Path("prepared")),
        Rehearse(workload=_WORKLOAD, micro_batch_size=1, device="cpu"),
    )
}
_ERROR = {"kind": "TrialLost", "message": "the disk is full", "hint": "make room"}


def _lines() -> list[tuple[str, Any]]:
    results = [(task, {"result": result, "error": None}) for task, result in _RESULTS]
    return [
        *results,
        ("train", {"phase": "step", "steps": [12, 40]}),
        ("train", {"phase": "compile"}),
        ("train", {"result": None, "error": _ERROR}),
        ("train", {"result": None, "error": None, "ended": _CRASHED}),
        ("trace", {"result": None, "error": None, "ended": _CRASHED}),
    ]


def _inputs() -> strategies.SearchStrategy[bytes]:
    def of_task(line: tuple[str, Any]) -> strategies.SearchStrategy[bytes]:
        task, content = line
        return changed_files([content], json_bytes).map(lambda text: _input(task, text))

    return strategies.sampled_from(_lines()).flatmap(of_task)


def _input(task: str, text: bytes) -> bytes:
    return task.encode() + b"\n" + text


class _Replies(Reader):
    """Reads a line as the server does, and makes of its result what the search makes of it."""

    def passes_first_check(self, given: bytes) -> bool:
        try:
            content = json.loads(given.partition(b"\n")[2])
        except (ValueError, RecursionError):
            return False
        return isinstance(content, dict) and bool({"phase", "result", "error"} & set(content))

    def read(self, given: bytes) -> Iterator[str]:
        name, _, line = given.partition(b"\n")
        task = name.decode()
        reply = parse_line(line)
        if isinstance(reply, PhaseReport | LastSign):
            return
        # It travels on, from the server to the search, and is read there again.
        again = line_of({**asdict(reply), "id": 1, "seconds": 1.5})
        found = reply_of(decode(again))
        try:
            value = _TASKS[task].value_of(found)
        except AutotuneError as error:
            told = found.error or found.ended
            if told is None or error.message != told.message:
                raise AssertionError(f"{told} is told as {error!r}") from error
            return
        if isinstance(value, FinishedTrial):
            yield from self._measured(value.measurement)
        elif isinstance(value, Prediction):
            value.to_dict()

    def _measured(self, measurement: Measurement) -> Iterator[str]:
        stored = json.loads(json.dumps(measurement_values(measurement), allow_nan=False))
        record = TrialRecord(
            **vars(measurement_from_values(stored)), number=0, config=TrainingConfig()
        )
        assert outcome_line(record)  # what prints it escapes it
        yield from shown(study_result([record]))


@contextmanager
def _reading_replies(_folder: Path) -> Iterator[Reader]:
    yield _Replies()


REPLY = Border(
    first_check="it is a JSON object with a phase, a result or an error",
    inputs=_inputs,
    valid=lambda: [_input(task, json_bytes(content)) for task, content in _lines()],
    reader=_reading_replies,
    modules=("execution/server/replies.py", "spec/result.py"),
    errors=(MalformedReply,),
)
