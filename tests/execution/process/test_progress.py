"""What a training reports of its progress, and how the server handles data from the pipe."""

import json
import os
import time
from collections import Counter

import pytest
import torch

from autotune.errors import InvalidInput
from autotune.execution.process.progress import PipeProgress
from autotune.execution.server.child_process import ChildProcess
from autotune.execution.server.limits import REPORT_SECONDS, TimeLimits, time_limits
from autotune.execution.server.replies import LARGEST_LINE_BYTES
from autotune.spec.config import TrainingConfig
from autotune.spec.parity import PARITY_STEPS
from autotune.spec.training_request import TrainingRequest
from autotune.training.trainer import trace, train

LIMITS = TimeLimits(trial_seconds=100.0, compile_seconds=50.0, step_seconds=20.0)


@pytest.fixture
def request_to_train(workload, prepared):
    config = TrainingConfig(micro_batch_size=workload.global_batch)
    return TrainingRequest(
        workload=workload,
        config=config,
        folder=prepared,
        device="cpu",
        cap_bytes=2**40,
        requested_at=time.monotonic(),
    )


@pytest.fixture
def pipe():
    ends = os.pipe()
    os.set_blocking(ends[0], False)
    before = list(torch._dynamo.callback.callback_handler.start_callbacks)
    yield ends
    torch._dynamo.callback.callback_handler.start_callbacks[:] = before
    for end in ends:
        os.close(end)


@pytest.fixture
def child(tmp_path):
    return ChildProcess(
        id=1,
        pid=0,
        pipe=-1,
        log_file=tmp_path / "trial.log",
        limits=LIMITS,
        host_memory_kills=0,
    )


def said(pipe):
    try:
        return [json.loads(line)["phase"] for line in os.read(pipe[0], 65536).splitlines()]
    except BlockingIOError:
        return []


def test_a_training_says_so_before_its_first_step_and_after_each_one(request_to_train, workload):
    stages = []
    train(request_to_train, progress=lambda stage, *_: stages.append(stage))
    batches = -(-workload.evaluation_sequences // workload.global_batch)
    assert Counter(stages) == {"step": 1 + workload.steps, "evaluation": 1 + batches}
    assert stages == sorted(stages, reverse=True)  # no step after evaluation


def test_the_first_steps_alone_say_so_too(request_to_train):
    stages = []
    trace(request_to_train, dropout=True, progress=lambda stage, *_: stages.append(stage))
    assert {stages[0], stages[-1]} == {"step"}
    assert set(stages) == {"step", "parity"}
    assert stages.count("step") > PARITY_STEPS


def test_a_training_says_how_many_of_its_steps_have_ended(request_to_train, workload):
    ended = []
    train(request_to_train, progress=lambda stage, *steps: ended.append(steps))
    wanted = workload.steps
    assert [steps for steps in ended if steps] == [(n, wanted) for n in range(1, wanted + 1)]


def test_a_line_says_at_which_step_a_training_is(pipe):
    progress = PipeProgress(pipe[1])
    progress("step")
    progress("evaluation")
    progress("step", 12, 40)
    progress("evaluation")
    progress("step")
    assert os.read(pipe[0], 65536).splitlines() == [
        b'{"phase": "step"}',
        b'{"phase": "evaluation"}',
        b'{"phase": "step", "steps": [12, 40]}',
        b'{"phase": "evaluation"}',
        b'{"phase": "step", "steps": [12, 40]}',
    ]


def test_a_hundred_quick_steps_are_a_handful_of_lines(pipe):
    progress = PipeProgress(pipe[1])
    began = time.monotonic()
    for _ in range(100):
        progress("step")
    assert 1 <= len(said(pipe)) <= 1 + (time.monotonic() - began) / REPORT_SECONDS


def test_code_that_is_compiled_in_a_step_is_noticed_once_and_until_the_next(pipe):
    progress = PipeProgress(pipe[1])
    progress("step")
    for scale in (2, 3):
        torch.compile(lambda x, scale=scale: x * scale, backend="eager")(torch.ones(2))
    progress("step")
    torch._dynamo.reset()  # forgets who watches; the next report puts that right
    progress("evaluation")
    torch.compile(lambda x: x + 5, backend="eager")(torch.ones(2))
    assert said(pipe) == ["step", "compile", "step", "evaluation", "compile"]


def test_what_is_compiled_before_the_first_step_belongs_to_the_start(pipe):
    progress = PipeProgress(pipe[1])
    progress._watch_compilation()
    torch.compile(lambda x: x - 7, backend="eager")(torch.ones(2))
    assert said(pipe) == []


# -- the server's side -----------------------------------------------------------------------------


def test_the_search_is_told_of_another_phase_at_once_and_of_a_step_twice_a_second(child):
    now = time.monotonic()
    child.receive(b'{"phase": "step"}\n')
    assert child.news(now) == {"id": 1, "phase": "step", "steps": None}
    child.receive(b'{"phase": "step", "steps": [3, 40]}\n')
    assert child.news(now + 0.4) is None
    child.receive(b'{"phase": "step", "steps": [4, 40]}\n')
    assert child.news(now + 0.5) == {"id": 1, "phase": "step", "steps": (4, 40)}
    assert child.news(now + 2.0) is None
    child.receive(b'{"phase": "evaluation"}\n')
    assert child.news(now + 2.0) == {"id": 1, "phase": "evaluation", "steps": None}


@pytest.mark.parametrize("steps", [b"3", b"[3]", b'["3", 4]', b"[1, 2, 3]"])
def test_a_trial_that_writes_steps_that_are_none_is_a_crash(child, steps):
    child.receive(b'{"phase": "step", "steps": %s}\n' % steps)
    assert child.exceeded_limit(time.monotonic())[0] == "crashed"
    assert child.outcome().ended.outcome == "crashed"


@pytest.mark.parametrize(
    ("phase", "seconds", "words"),
    [
        ("start", 99.0, None),
        ("start", 101.0, "no result within 100 s"),
        ("step", 19.0, None),
        ("step", 21.0, "no step ended within 20 s"),
        ("compile", 49.0, None),
        ("compile", 51.0, "compilation took more than 50 s"),
        ("evaluation", 21.0, "no batch of evaluation ended within 20 s"),
        ("step", 101.0, "no step ended within 20 s"),
        ("parity", 51.0, None),
        ("parity", 101.0, "reading the gradients took more than 100 s"),
        ("waiting", 10_000.0, None),
    ],
)
def test_each_phase_has_a_limit_in_addition_to_that_of_the_trial(child, phase, seconds, words):
    if phase != "start":
        child.receive(b'{"phase": "%s"}\n' % phase.encode())
    why, message = child.exceeded_limit(time.monotonic() + seconds)
    assert why == ("timeout" if words else "")
    assert message == (f"{words}; see {child.log_file}" if words else "")


def test_each_finished_step_restarts_the_step_limit(child):
    child.receive(b'{"phase": "step"}\n')
    first = child.deadline()
    time.sleep(0.01)
    child.receive(b'{"phase": "step"}\n')
    assert child.deadline() > first


def test_reading_gradients_counts_for_no_limit_of_the_training(child, monkeypatch):
    now = time.monotonic()
    for phase, seconds in (("step", 1.0), ("parity", 2.0), ("step", 92.0)):
        monkeypatch.setattr("time.monotonic", lambda seconds=seconds: now + seconds)
        child.receive(b'{"phase": "%s"}\n' % phase.encode())
    assert child.exceeded_limit(now + 111.0) == ("", "")
    assert "no step ended within 20 s" in child.exceeded_limit(now + 113.0)[1]
    child.receive(b'{"phase": "step"}\n')
    monkeypatch.setattr("time.monotonic", lambda: now + 185.0)
    child.receive(b'{"phase": "step"}\n')
    assert child.exceeded_limit(now + 189.0) == ("", "")
    assert "no result within 100 s" in child.exceeded_limit(now + 191.0)[1]


def test_waiting_for_a_turn_counts_for_no_limit_and_has_none(child, monkeypatch):
    now = time.monotonic()
    child.receive(b'{"phase": "waiting"}\n')
    assert child.deadline() is None
    monkeypatch.setattr("time.monotonic", lambda: now + 1000.0)
    child.receive(b'{"phase": "step"}\n')
    assert child.exceeded_limit(now + 1019.0) == ("", "")
    assert "no step ended within 20 s" in child.exceeded_limit(now + 1021.0)[1]
    monkeypatch.setattr("time.monotonic", lambda: now + 1090.0)
    child.receive(b'{"phase": "step"}\n')
    assert child.exceeded_limit(now + 1099.0) == ("", "")
    assert "no result within 100 s" in child.exceeded_limit(now + 1101.0)[1]


def test_a_result_may_come_in_pieces_among_the_phases(child):
    text = b'{"phase": "step"}\n{"result": {"outcome": "ok"}, "error": null}\n'
    for start in range(0, len(text), 7):
        child.receive(text[start : start + 7])
    assert child.reply.result == {"outcome": "ok"}


@pytest.mark.parametrize("garbage", [b"not json", b"[1]", b'{"phase": 3}', b"\xff", b"["])
def test_nothing_is_believed_of_a_trial_that_has_written_something_else(child, garbage):
    child.receive(garbage + b'\n{"result": {"outcome": "ok"}, "error": null}\n')
    assert child.outcome().ended.outcome == "crashed"


def test_a_result_that_arrives_while_the_process_is_being_ended_is_ignored(child):
    child.ended_because, child.message = "timeout", "no result within 100 s"
    child.receive(b'{"result": {"outcome": "crashed"}, "error": null}\n')
    assert child.outcome().ended.outcome == "timeout"


def test_a_trial_that_writes_a_line_without_end_is_a_crash_before_its_end(child):
    for _ in range(1 + LARGEST_LINE_BYTES // 2**20):
        child.receive(b"x" * 2**20)
    assert child.exceeded_limit(time.monotonic())[0] == "crashed"


def test_comparisons_again_and_again_do_not_lengthen_a_trial(child, monkeypatch):
    """Each reading of gradients is outside the limits of the training; all together have one."""
    now = time.monotonic()
    for second in range(0, 140, 2):
        for moment, phase in ((second, "parity"), (second + 1.9, "step")):
            monkeypatch.setattr("time.monotonic", lambda moment=moment: now + moment)
            child.receive(b'{"phase": "%s"}\n' % phase.encode())
    child.receive(b'{"phase": "parity"}\n')
    assert child.exceeded_limit(time.monotonic())[0] == "timeout"


# -- the limits ------------------------------------------------------------------------------------


def test_compilation_has_half_and_a_step_a_fifth_of_a_trials_time():
    assert time_limits(600.0) == TimeLimits(
        trial_seconds=600.0, compile_seconds=300.0, step_seconds=120.0
    )


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), 1e12, True, "10m", None])
@pytest.mark.parametrize("limit", ["trial", "compile", "step"])
def test_what_is_no_duration_is_no_limit(limit, seconds):
    limits = {
        "trial_seconds": 600.0,
        "compile_seconds": 600.0,
        "step_seconds": 600.0,
        f"{limit}_seconds": seconds,
    }
    with pytest.raises(InvalidInput, match="time limit"):
        TimeLimits(**limits)


@pytest.mark.parametrize("limit", ["compile", "step"])
def test_a_limit_above_that_of_the_trial_is_rejected(limit):
    with pytest.raises(
        InvalidInput, match=f"{limit} time limit of 601 s is longer than the whole trial"
    ):
        time_limits(600.0, **{f"{limit}_seconds": 601.0})
