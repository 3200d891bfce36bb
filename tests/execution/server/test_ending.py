"""How trials end: by limits of their own phase, and with all that they have started."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from autotune.errors import TrialLost
from autotune.execution.server.client import TrialServer
from autotune.execution.server.limits import TimeLimits
from autotune.execution.server.process_tree import descendants
from autotune.execution.tasks import Trace, Train
from autotune.spec.config import TrainingConfig
from autotune.spec.parity import NoTrace
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import make_workload

WAIT_SECONDS = 60
LONG = TimeLimits(trial_seconds=600.0, compile_seconds=600.0, step_seconds=600.0)

SCRIPT = """
    import os, signal, sys, time
    import torch, autotune
    trial = os.getpid()

    def leave_a_child_behind():
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                with open("LEFT", "a") as file:
                    print(os.getpid(), trial, file=file)
                time.sleep(3600)
            os._exit(0)
        os.wait()

    model = torch.nn.Linear(4, 4)
    model, optimizer = autotune.apply(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(12):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 1:
            WHAT
        autotune.report(tokens=8, loss=loss)
"""


def train_of(training):
    return Train(training=training)


def trace_of(training):
    return Trace(training=training, dropout=True)


def measurement_of(future):
    """Returns what a training of the script measured."""
    return future.result(WAIT_SECONDS).measurement


@pytest.fixture
def run(server, tmp_path):
    """run("time.sleep(1)") is the future of a trial that does so in every step but the first."""

    def submit(what, *, limits=LONG, task_of=train_of, by=server):
        file = tmp_path / "train.py"
        what = textwrap.indent(textwrap.dedent(what), " " * 8).strip()
        file.write_text(
            textwrap.dedent(SCRIPT).replace("WHAT", what).replace("LEFT", str(tmp_path / "left"))
        )
        workload = make_workload("cpu", {"script": str(file), "global_batch": 4, "steps": 12})
        training = TrainingRequest(
            workload=workload,
            config=TrainingConfig(micro_batch_size=4),
            folder=tmp_path,
            device="cpu",
            cap_bytes=2**40,
        )
        return by.submit(task_of(training), log_file=tmp_path / "trial.log", limits=limits)

    return submit


def outcome_of(future):
    return measurement_of(future).outcome


def wait_until(condition):
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def child_left_by(tmp_path) -> int:
    return left_by(tmp_path)[0]


def left_by(tmp_path) -> list[int]:
    """The first child that was left behind, and the trial that did."""
    file = tmp_path / "left"
    wait_until(lambda: file.exists() and file.read_text().endswith("\n"))
    return [int(text) for text in file.read_text().split()[:2]]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


# -- limits ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_training_longer_than_the_step_limit_goes_on_while_steps_end(run):
    assert (
        outcome_of(run("time.sleep(0.2)", limits=dataclasses.replace(LONG, step_seconds=1.5)))
        == "ok"
    )  # eleven such steps


@pytest.mark.slow
def test_a_step_that_compiles_may_take_as_long_as_compilation_may(run):
    compiling = """
        def compiler(graph, inputs):
            time.sleep(1.5)
            return graph.forward
        if step == 1:
            torch.compile(torch.nn.Linear(4, 4), backend=compiler)(torch.ones(2, 4))
    """
    future = run(compiling, limits=dataclasses.replace(LONG, step_seconds=1.0))
    assert outcome_of(future) == "ok"


def test_a_comparison_that_hangs_ends_with_the_message_of_its_limit(run):
    limits = dataclasses.replace(LONG, step_seconds=0.5)
    future = run("time.sleep(3600)", limits=limits, task_of=trace_of)
    ended = future.result(WAIT_SECONDS)
    assert isinstance(ended, NoTrace)
    assert ended.outcome == "timeout"
    assert re.search(r"no step ended within 0.5 s; see .*trial.log", ended.message)


@pytest.mark.slow
def test_a_trial_that_writes_more_to_its_log_than_a_disk_has_room_for_is_a_crash(run):
    """A log of two GiB, most of it a hole that takes no room."""
    flood = "os.truncate(1, 2**31) or time.sleep(3600)"
    measurement = measurement_of(run(flood))
    assert (measurement.outcome, measurement.message.partition(" to ")[0]) == (
        "crashed",
        "wrote more than 1.00 GiB",
    )


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_cancelled_trial_that_ignores_the_signal_is_interrupted_all_the_same(
    run, server, tmp_path
):
    future = run(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); leave_a_child_behind(); time.sleep(3600)"
    )
    left = child_left_by(tmp_path)
    server.cancel(future)
    assert outcome_of(future) == "interrupted"
    assert is_gone(left)


def test_a_trial_that_cleans_up_after_sigterm_has_the_grace_period(run, server, tmp_path):
    file = tmp_path / "cleaned"
    clean = (
        f"signal.signal(15, lambda *_: (time.sleep(0.2), open({str(file)!r}, 'w'), os._exit(0)))"
    )
    future = run(f"{clean}; leave_a_child_behind(); time.sleep(3600)")
    child_left_by(tmp_path)
    server.cancel(future)
    assert outcome_of(future) == "interrupted"
    assert file.exists()


def test_what_a_killed_trial_left_behind_is_ended_before_its_failure_is_reported(run, tmp_path):
    future = run("leave_a_child_behind(); time.sleep(3600)")
    left, trial = left_by(tmp_path)
    os.kill(trial, signal.SIGKILL)
    with pytest.raises(TrialLost):
        future.result(WAIT_SECONDS)
    assert is_gone(left)


def test_what_a_finished_trial_left_behind_is_ended_and_another_trials_is_not(
    run, server, tmp_path
):
    other = run("leave_a_child_behind(); time.sleep(3600)")
    kept = child_left_by(tmp_path)
    finished = run("leave_a_child_behind()")
    assert outcome_of(finished) == "ok"
    assert not is_gone(kept)
    server.cancel(other)
    assert outcome_of(other) == "interrupted"
    assert descendants(server.pid) == []


def test_a_process_of_anybody_may_have_a_name_in_any_encoding():
    named = (
        "import sys; open('/proc/self/comm', 'wb').write(b'caf\\xe9 \\xd0)'); "
        "print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", named], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        assert b"\xd0" in Path(f"/proc/{process.pid}/stat").read_bytes()
        assert process.pid in descendants(os.getpid())


@pytest.mark.slow
def test_a_closing_server_ends_processes_that_ignore_sigterm_in_another_session(run, tmp_path):
    with TrialServer(log_file=tmp_path / "server.log") as closing:
        future = run(
            "signal.signal(15, signal.SIG_IGN); leave_a_child_behind(); time.sleep(3600)",
            by=closing,
        )
        left = child_left_by(tmp_path)
    assert is_gone(left)
    assert outcome_of(future) == "interrupted"


@pytest.mark.slow
def test_what_a_killed_server_left_behind_is_ended_by_the_caller(run, tmp_path):
    with TrialServer(log_file=tmp_path / "server.log") as killed:
        future = run("leave_a_child_behind(); time.sleep(3600)", by=killed)
        left = child_left_by(tmp_path)
        os.kill(killed.pid, signal.SIGKILL)
        with pytest.raises(TrialLost):
            future.result(WAIT_SECONDS)
        assert is_gone(left)
