"""What the process of a request may write to its pipe: each line is checked, whatever it is."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import ProcessEnded, StudyMismatch
from autotune.execution.server import replies
from autotune.execution.server.replies import MalformedReply, PhaseReport, line_of, parse_line
from autotune.execution.tasks import (
    CheckDevice,
    Examine,
    Identify,
    ListDevices,
    MeasurePeaks,
    ModelSha256,
    Predict,
    Prepare,
    PrepareSeed,
    Probe,
    ProfileTraining,
    Rehearse,
    Trace,
    Train,
    TrainInTurn,
    value_of,
)
from autotune.spec.config import TrainingConfig
from autotune.spec.limits import LARGEST_LOSS
from autotune.spec.parity import PROJECTIONS, NoTrace, ParityTrace
from autotune.spec.prediction import PredictionRequest
from autotune.spec.provenance import MEASURED
from autotune.spec.reading import parse
from autotune.spec.result import DeviceInfo, Measurement
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import make_workload

OK = Measurement(
    outcome="ok",
    peak_memory_bytes=2**20,
    device_bytes=2**20,
    tokens_per_second=1000.0,
    perplexity=20.0,
    perplexity_source=MEASURED,
)
DEVICE = DeviceInfo(
    device="cpu", name="a CPU", total_memory_bytes=2**30, versions={"torch": "2.11"}
)
TRACE = ParityTrace(
    losses=(3.0, 2.0, 1.0),
    gradient_norms={"rest": 1.0},
    gradient_projections={"rest": (0.5,) * PROJECTIONS},
    draws_random_numbers=False,
)
PREDICTION = {
    "device": "cpu",
    "fake_device": "cpu",
    "peak_memory_bytes": 100,
    "upper_bound_bytes": 110,
    "lower_bound_bytes": 90,
    "phase": "backward",
    "module": "",
    "operator": "aten.mm",
    "bytes_by_category": {"activations": 100},
    "parameters": 10,
    "holders": [
        {
            "category": "activations",
            "module": "",
            "operator": "aten.mm",
            "count": 1,
            "size_bytes": 100,
        }
    ],
    "timeline": {
        "events": [1, 2],
        "bytes_by_category": {"activations": [50, 100]},
        "phases": [["forward", 0, 1]],
        "peak_event": 2,
    },
    "notes": ["an assumption"],
}
PROFILE = {
    "device": "cpu",
    "steps": 3,
    "step_seconds": 0.1,
    "profiled_step_seconds": 0.2,
    "phase_seconds": {"forward": 0.1},
    "recomputed_seconds": None,
    "idle_seconds": None,
    "operators": [
        {
            "name": "aten::mm",
            "calls": 3.0,
            "host_seconds": 0.1,
            "device_seconds": 0.0,
            "allocated_bytes": 100,
        }
    ],
    "other_operators": 0,
    "peak_memory_bytes": 100,
    "peak_phase": "forward",
    "bytes_by_category": PREDICTION["bytes_by_category"],
    "holders": PREDICTION["holders"],
    "timeline": PREDICTION["timeline"],
    "compilation": {
        "graphs": [
            {"name": "forward", "operators": 4, "seconds": 1.0, "recompiled_because": ""},
        ],
        "breaks": [["a call of print", 1]],
        "code_files": ["code/graph-0.py"],
    },
    "files": ["trace.json.gz"],
    "torch_version": "2.13.0",
}
VALID_RESULTS: dict[str, Any] = {
    "prepare": {
        "text_sha256": "ab",
        "model_sha256": "",
        "parameters": 10,
        "chat_column": None,
        "prompt_format": None,
    },
    "identify": asdict(DEVICE),
    "probe": {"device": asdict(DEVICE), "unavailable": {"precision": {"fp8": "no hardware"}}},
    "measure_peaks": asdict(DEVICE),
    "examine": {"unavailable": {}, "files": {"train.py": "ab"}, "missing_variable": ""},
    "rehearse": "",
    "model_sha256": "ab",
    "list_devices": [asdict(DEVICE)],
    "check_device": None,
    "predict": PREDICTION,
    "train": {"measurement": asdict(OK), "seconds": 1.0, "script_files": {"train.py": "ab"}},
    "train_in_turn": {"measurement": {"outcome": "ok"}, "seconds": 1.0},
    "trace": TRACE.to_dict(),
    "profile_training": PROFILE,
    "prepare_seed": None,
}
"""An answer to every task."""

WORKLOAD, CONFIG = make_workload("cpu", {}), TrainingConfig()
TRAINING = TrainingRequest(
    workload=WORKLOAD, config=CONFIG, folder=Path("prepared"), device="cpu", cap_bytes=2**30
)
TASKS = {
    task.name: task
    for task in (
        Prepare(workload=WORKLOAD, folder=Path("prepared")),
        Identify(device=None),
        Probe(device="cpu", choices={}, with_context=False),
        MeasurePeaks(device=DEVICE, precisions=["fp32"], shape=None),
        Examine(workload=WORKLOAD, choices={}, device="cpu"),
        Rehearse(workload=WORKLOAD, micro_batch_size=1, device="cpu"),
        ModelSha256(workload=WORKLOAD),
        ListDevices(),
        CheckDevice(device="cpu"),
        Predict(request=PredictionRequest(workload=WORKLOAD, config=CONFIG, device="cpu")),
        Train(training=TRAINING),
        TrainInTurn(training=TRAINING, address="socket"),
        Trace(training=TRAINING, dropout=True),
        ProfileTraining(training=TRAINING, steps=3, folder=Path("profile")),
        PrepareSeed(workload=WORKLOAD, prepared=Path("prepared"), folder=Path("seed")),
    )
}
LOG = Path("trial.log")


def line(result=None, error=None) -> bytes:
    return json.dumps({"result": result, "error": error}).encode()


def training(**changes) -> bytes:
    return line({"measurement": {**asdict(OK), **changes}, "seconds": 1.0})


def value_in(text: bytes, task):
    """What the caller of a task gets for a line of its process. Raises MalformedReply."""
    return TASKS[task].value_of(parse_line(text))


def is_malformed(text, *, task) -> bool:
    try:
        value_in(text, task)
    except MalformedReply:
        return True
    return False


def test_every_task_is_carried_out_and_has_a_check_of_its_answer():
    from autotune.execution.process.answers import FUNCTIONS

    assert set(FUNCTIONS) == {type(task) for task in TASKS.values()}
    assert TASKS.keys() == VALID_RESULTS.keys()


@pytest.mark.parametrize("name", TASKS)
def test_the_process_reads_the_request_that_was_sent(name):
    sent = json.loads(line_of(asdict(TASKS[name])))
    assert json.loads(line_of(asdict(parse(type(TASKS[name]), sent)))) == sent


def test_a_valid_answer_is_what_the_caller_gets():
    for task, valid in VALID_RESULTS.items():
        value = value_in(line(valid), task)
        again = json.loads(line_of({"value": value}))["value"]
        if isinstance(valid, dict):
            again = {name: again[name] for name in valid}
        if task not in (
            "train",
            "train_in_turn",
            "predict",
            "profile_training",
            "trace",
            "list_devices",
        ):
            assert again == json.loads(json.dumps(valid)), task
    assert value_in(line(VALID_RESULTS["train"]), "train").measurement == OK
    assert value_in(line(VALID_RESULTS["trace"]), "trace") == TRACE
    assert value_in(line(VALID_RESULTS["list_devices"]), "list_devices") == [DEVICE]


def test_an_answer_of_another_type_is_malformed():
    for task, valid in VALID_RESULTS.items():
        for result in (None, 3, True, {"outcome": None}, {"a": {}}, [3], "a text"):
            if type(result) is not type(valid) or isinstance(valid, dict | list):
                assert is_malformed(line(result), task=task), (task, result)


def test_a_measurement_of_another_shape_is_malformed():
    for changes in (
        {"outcome": "unknown"},
        {"peak_memory_bytes": -1},
        {"device_bytes": 2**63},
        {"device_bytes": True},
        {"tokens_per_second": 0.0},
        {"perplexity": "20"},
        {"bytes_by_kind": {"parameters": "much"}},
        {"perplexity_source": {"kind": []}},
        {"a_field_of_another_release": 1},
    ):
        assert is_malformed(training(**changes), task="train"), changes
    files = {**VALID_RESULTS["train"], "script_files": {"train.py": 3}}
    assert is_malformed(line(files), task="train")


def test_a_profile_of_another_shape_is_malformed():
    for changes in (
        {"step_seconds": -1.0},
        {"peak_memory_bytes": "much"},
        {"operators": [{"name": "aten::mm"}]},
        {"timeline": None},
        {"files": [3]},
    ):
        assert is_malformed(line({**PROFILE, **changes}), task="profile_training"), changes


# -- how a process has ended -----------------------------------------------------------------------


def ended(**values) -> bytes:
    ending = {"outcome": "timeout", "message": "no result within 9 s", **values}
    return json.dumps({"result": None, "error": None, "ended": ending, "seconds": 9.5}).encode()


def test_the_end_of_a_training_is_its_measurement():
    found = value_in(ended(), "train")
    assert (found.measurement.outcome, found.seconds) == ("timeout", 9.5)
    assert found.measurement.message == "no result within 9 s"


def test_the_end_of_first_steps_says_why_there_are_none_unless_they_were_interrupted():
    assert value_in(ended(), "trace") == NoTrace(outcome="timeout", message="no result within 9 s")
    with pytest.raises(ProcessEnded):
        value_in(ended(outcome="interrupted"), "trace")


@pytest.mark.parametrize("task", ["identify", "predict", "profile_training", "rehearse"])
def test_the_end_of_any_other_task_is_an_error(task):
    with pytest.raises(ProcessEnded, match="no result within 9 s"):
        value_in(ended(), task)


def test_a_training_has_used_the_devices_of_its_workload():
    workload = replace(WORKLOAD, devices_per_trial=2, global_batch=8)
    task = Train(training=replace(TRAINING, workload=workload))
    assert task.value_of(parse_line(training())).measurement.devices == 2
    assert task.value_of(parse_line(ended())).measurement.devices == 2


def test_a_reply_that_cannot_be_read_is_a_crash_of_a_training_and_an_error_of_another_task():
    message = {"result": 3, "error": None}
    assert value_of(message, TASKS["train"], log_file=LOG).measurement.outcome == "crashed"
    with pytest.raises(ProcessEnded, match=r"no valid reply: .*; see trial\.log"):
        value_of(message, TASKS["identify"], log_file=LOG)


# -- numbers and texts -----------------------------------------------------------------------------


def test_a_number_that_is_not_finite_was_not_measured():
    found = value_in(training(perplexity=math.nan, final_loss=math.inf), "train").measurement
    assert (found.perplexity, found.final_loss) == (None, None)


@pytest.mark.parametrize("loss", [-LARGEST_LOSS, LARGEST_LOSS])
def test_the_perplexity_of_every_loss_that_a_training_can_end_with_is_valid(loss):
    perplexity = math.exp(loss)
    found = value_in(training(perplexity=perplexity), "train").measurement
    assert found.perplexity == perplexity


def test_a_message_can_be_printed_and_is_not_longer_than_a_page():
    found = value_in(training(message="\ud800\0" + "x" * 10**6), "train")
    message = found.measurement.message
    assert message.encode().startswith(b"?\xef\xbf\xbdx")
    assert len(message) == replies.LONGEST_TEXT


def test_any_other_line_is_malformed():
    for text in (
        b"",
        b"null",
        b"[]",
        b"{}",
        b"hello",
        b"\xff\xfe",
        b"[" * 10**6,
        b'{"result": ' + b"9" * 9999 + b', "error": null}',
        b'{"result": null}',
        b'{"phase": ["step"]}',
        b'{"phase": "sleep"}',
        b'{"phase": "step", "steps": [3]}',
        b'{"phase": "step", "steps": [-3, 1]}',
        b'{"phase": "step", "steps": ["1", "3"]}',
        b'{"phase": "step", "steps": [true, 3]}',
        b'{"phase": "step", "steps": {"ended": 1}}',
    ):
        assert is_malformed(text, task="model_sha256"), text[:40]


def test_a_phase_is_reported_with_its_steps():
    report = parse_line(b'{"phase": "step", "steps": [1, 3]}')
    assert report == PhaseReport(phase="step", steps=(1, 3))


def test_an_error_keeps_its_class_message_and_hint():
    told = {"kind": "StudyMismatch", "message": "another text", "hint": "prepare it again"}
    error = parse_line(line(error=told)).error.exception()
    assert (type(error), error.message, error.hint) == (
        StudyMismatch,
        "another text",
        "prepare it again",
    )


def test_a_training_ends_with_no_error_of_another_kind():
    for kind in ("Iterable", "re", "ValueError", "Stopped", "InvalidInput", "", [], None, 3):
        told = {"kind": kind, "message": "", "hint": ""}
        assert is_malformed(line(error=told), task="train"), kind
