"""What the process of a request may write to its pipe: each line is checked, whatever it is."""

import json
import math
from dataclasses import asdict

import pytest

from autotune.errors import StudyMismatch
from autotune.execution.server import replies
from autotune.execution.server.replies import MalformedReply, PhaseReport, parse_line
from autotune.spec.limits import LARGEST_LOSS
from autotune.spec.parity import PROJECTIONS, ParityTrace
from autotune.spec.provenance import MEASURED
from autotune.spec.result import DeviceInfo, Measurement

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
VALID_RESULTS = {
    "prepare": {"text_sha256": "ab", "model_sha256": "", "parameters": 10, "chat_column": None},
    "identify": asdict(DEVICE),
    "probe": {"device": asdict(DEVICE), "unavailable": {"precision": {"fp8": "no hardware"}}},
    "measure_peaks": {
        "matrix_flops_per_second": {"fp32": 1.9e11},
        "layer_flops_per_second": {"fp32": 1.1e11},
        "bandwidth_bytes_per_second": 2.8e10,
        "operator_seconds": 4e-6,
    },
    "examine": {"unavailable": {}, "files": {"train.py": "ab"}, "missing_variable": ""},
    "rehearse": "",
    "model_sha256": "ab",
    "devices": [asdict(DEVICE)],
    "check_device": {},
    "predict": PREDICTION,
    "train": {**asdict(OK), "script_files": {"train.py": "ab"}},
    "train_in_turn": asdict(Measurement(outcome="ok")),
    "trace": {"trace": TRACE.to_dict(), "failure": "", "outcome": "ok"},
    "profile": {"profile": PROFILE, "failure": ""},
    "prepare_seed": {},
}
"""A result of every task."""


def line(result=None, error=None) -> bytes:
    return json.dumps({"result": result, "error": error}).encode()


def training(**changes) -> bytes:
    return line({**asdict(OK), **changes})


def is_malformed(text, *, task) -> bool:
    try:
        parse_line(text, task=task)
    except MalformedReply:
        return True
    return False


def test_every_task_has_a_check_of_its_result():
    from autotune.execution.server.tasks import TASKS

    assert replies.RESULTS.keys() == TASKS.keys() == VALID_RESULTS.keys()


def test_a_valid_result_is_returned_as_it_is():
    for task, valid in VALID_RESULTS.items():
        result = json.loads(json.dumps(valid))
        assert parse_line(line(result), task=task).result == result


def test_a_result_of_another_type_is_malformed():
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
        {"script_files": {"train.py": 3}},
        {"a_field_of_another_release": 1},
    ):
        assert is_malformed(training(**changes), task="train"), changes


def test_a_profile_of_another_shape_is_malformed():
    for changes in (
        {"step_seconds": -1.0},
        {"peak_memory_bytes": "much"},
        {"operators": [{"name": "aten::mm"}]},
        {"timeline": None},
        {"files": [3]},
    ):
        profile = line({"profile": {**PROFILE, **changes}, "failure": ""})
        assert is_malformed(profile, task="profile"), changes


def test_a_number_that_is_not_finite_was_not_measured():
    reply = parse_line(training(perplexity=math.nan, final_loss=math.inf), task="train")
    assert (reply.result["perplexity"], reply.result["final_loss"]) == (None, None)


@pytest.mark.parametrize("loss", [-LARGEST_LOSS, LARGEST_LOSS])
def test_the_perplexity_of_every_loss_that_a_training_can_end_with_is_valid(loss):
    perplexity = math.exp(loss)
    reply = parse_line(training(perplexity=perplexity), task="train")
    assert reply.result["perplexity"] == perplexity


def test_a_message_can_be_printed_and_is_not_longer_than_a_page():
    reply = parse_line(training(message="\ud800\0" + "x" * 10**6), task="train")
    message = reply.result["message"]
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
    report = parse_line(b'{"phase": "step", "steps": [1, 3]}', task="train")
    assert report == PhaseReport(phase="step", steps=(1, 3))


def test_an_error_keeps_its_class_message_and_hint():
    told = {"kind": "StudyMismatch", "message": "another text", "hint": "prepare it again"}
    error = parse_line(line(error=told), task="train").error.exception()
    assert (type(error), error.message, error.hint) == (
        StudyMismatch,
        "another text",
        "prepare it again",
    )


def test_a_training_ends_with_no_error_of_another_kind():
    for kind in ("Iterable", "re", "ValueError", "Stopped", "InvalidInput", "", [], None, 3):
        told = {"kind": kind, "message": "", "hint": ""}
        assert is_malformed(line(error=told), task="train"), kind
