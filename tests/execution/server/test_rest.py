"""What rests while a training of the same server is timed, with real processes."""

import time
from pathlib import Path

import pytest

from autotune.errors import ProcessEnded
from autotune.execution.server.child_process import ChildProcess
from autotune.execution.server.client import TrialServer
from autotune.execution.server.limits import TimeLimits
from autotune.execution.tasks import ListDevices, Predict, Task
from autotune.spec.training_request import TIMED_STAGES
from tests.building.hostile_server import Attack, hostile_command

WAIT_SECONDS = 60


@pytest.fixture
def server(tmp_path):
    with TrialServer(log_file=tmp_path / "server.log", command=hostile_command()) as trial_server:
        yield trial_server


@pytest.fixture
def phase(tmp_path):
    """The file in which a training finds what it is to report."""
    (tmp_path / "phase").write_text("compile")
    return tmp_path / "phase"


@pytest.fixture
def training(server, phase, tmp_path):
    task = Attack(doing="report_what_is_in", arguments={"file": str(phase)})
    return server.submit(task, log_file=tmp_path / "trial.log")


@pytest.fixture
def beside(server, training, tmp_path):
    task = Attack(doing="sleep", instead_of=ListDevices(), rests=True)
    return server.submit(task, log_file=tmp_path / "beside.log")


def is_reached(states, server) -> bool:
    """Whether the processes of a server reach these states, in the order of their beginning."""
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        found = [
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in children
        ]
        if ["T" if state == "T" else "runs" for state in found] == states:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("stage", TIMED_STAGES)
def test_it_stands_still_while_the_training_is_timed_and_then_goes_on(
    stage, server, beside, phase, training
):
    assert is_reached(["runs", "runs"], server)
    phase.write_text(stage)
    assert is_reached(["runs", "T"], server)
    phase.write_text("compile")
    assert is_reached(["runs", "runs"], server)
    phase.write_text(stage)
    assert is_reached(["runs", "T"], server)
    phase.unlink()
    training.result(WAIT_SECONDS)
    assert is_reached(["runs"], server)


def test_it_stands_still_from_the_first_moment_where_it_begins_meanwhile(
    server, phase, training, tmp_path
):
    phase.write_text("step")
    began = time.monotonic()
    while server.doing(training).phase != "step" and time.monotonic() < began + WAIT_SECONDS:
        time.sleep(0.01)
    task = Attack(doing="sleep", instead_of=ListDevices(), rests=True)
    server.submit(task, log_file=tmp_path / "beside.log")
    assert is_reached(["runs", "T"], server)


def test_it_can_be_ended_while_it_stands_still(server, beside, phase):
    phase.write_text("step")
    assert is_reached(["runs", "T"], server)
    server.cancel(beside)
    with pytest.raises(ProcessEnded):
        beside.result(WAIT_SECONDS)


def test_nothing_is_left_of_it_once_the_server_has_ended(server, beside, phase):
    phase.write_text("step")
    assert is_reached(["runs", "T"], server)
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    server.close()
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def test_its_limits_of_time_do_not_count_the_rest(tmp_path):
    limits = TimeLimits(trial_seconds=10.0, compile_seconds=5.0, step_seconds=2.0)
    child = ChildProcess(
        id=1,
        pid=0,
        pipe=0,
        log_file=tmp_path / "log",
        limits=limits,
        host_memory_kills=0,
        started=0.0,
    )
    child.rest(4.0)
    assert child.exceeded_limit(1000.0) == ("", "")
    child.go_on(1000.0)
    assert child.exceeded_limit(1005.9) == ("", "")
    assert child.exceeded_limit(1006.1)[0] == "timeout"


def test_a_training_that_has_its_result_is_no_longer_timed(tmp_path):
    child = ChildProcess(
        id=1,
        pid=0,
        pipe=0,
        log_file=tmp_path / "log",
        limits=None,
        host_memory_kills=0,
        request={"is_training": True},
        phase="step",
    )
    assert child.is_timed
    child.ended_because = "has its result"
    assert not child.is_timed


def test_of_all_tasks_only_predictions_rest():
    def kinds(task: type[Task]) -> set[type[Task]]:
        return {task}.union(*(kinds(kind) for kind in task.__subclasses__()))

    assert {kind for kind in kinds(Task) if kind.rests} == {Predict}
