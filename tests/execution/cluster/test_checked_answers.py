"""What a node answers is checked where it arrives: a failure later would end no request."""

from concurrent.futures import Future
from dataclasses import asdict, replace

import pytest

from autotune.errors import AutotuneError, StudyMismatch, TrialLost
from autotune.execution.server.replies import TaskError, TaskReply, line_of
from autotune.execution.tasks import Identify, Train
from autotune.spec.attempt import FinishedTrial
from tests.building.hostile_server import TRAINING
from tests.building.studies import measured

pytest.importorskip("ray")

from autotune.execution.cluster.executor import ClusterExecutor
from autotune.execution.cluster.files import Shipment
from autotune.execution.cluster.remote_worker import RemoteWorker
from autotune.execution.cluster.worker import WorkerReply

WAIT_SECONDS = 10


class Remote:
    """A method of an actor that answers at once."""

    def __init__(self, answer):
        self._answer = answer

    def remote(self, *_):
        return self

    def future(self):
        done = Future()
        done.set_result(self._answer)
        return done


class Actor:
    """A worker that gives one answer to everything."""

    def __init__(self, answer):
        self.perform = Remote(answer)
        self.describe = Remote({"folder": "nowhere", "sharing": ""})
        self.state = Remote(None)


@pytest.fixture
def told(tmp_path, monkeypatch):
    """told(answer, task) is the future of a task whose worker answers so."""
    monkeypatch.setattr("autotune.execution.cluster.remote_worker.ray.kill", lambda _: None)
    monkeypatch.setattr(RemoteWorker, "_watch", lambda _: None)

    def call(answer, task):
        worker = RemoteWorker(lambda: Actor(answer), place="a", node="a", note=lambda _: None)
        executor = ClusterExecutor(
            tmp_path,
            worker=worker,
            shipment=Shipment(),
            excluded=(),
            cores=1,
            should_stop=lambda: False,
            note=lambda _: None,
        )
        return executor.call(task)

    return call


def trained(tmp_path, **changes):
    """What a node answers to a training, and the training."""
    finished = FinishedTrial(measurement=measured(), seconds=1.0)
    line = line_of(asdict(TaskReply(result=finished)))
    folder = tmp_path / "study" / "prepared"
    training = replace(TRAINING, folder=folder, snapshot_file=tmp_path / "snapshot")
    return WorkerReply(**{"line": line, "log": b"text", **changes}), Train(training=training)


def test_a_trial_has_its_measurement_and_its_time_and_its_log_comes_to_the_driver(told, tmp_path):
    finished = told(*trained(tmp_path)).result(WAIT_SECONDS)
    assert finished == FinishedTrial(measurement=measured(), seconds=1.0)
    assert (tmp_path / "study" / "logs" / "train.log").read_bytes() == b"text"
    assert not (tmp_path / "snapshot").exists()


def test_a_number_that_is_not_finite_was_not_measured(told, tmp_path):
    trial = {"measurement": asdict(measured(final_loss=float("nan"))), "seconds": 1.0}
    line = line_of(asdict(TaskReply(result=trial)))
    measurement = told(*trained(tmp_path, line=line)).result(WAIT_SECONDS).measurement
    assert measurement.final_loss is None
    assert measurement.tokens_per_second == 1000.0


def line_with(**values):
    return line_of({"result": None, "error": None, **values})


MEASURED = asdict(measured())


@pytest.mark.parametrize(
    "changes",
    [
        {"line": b"no JSON"},
        {"line": b"{}"},
        {"line": line_with()},
        {"line": line_with(result={"measurement": MEASURED, "seconds": -1.0})},
        {"line": line_with(result={"measurement": {"outcome": "splendid"}, "seconds": 1.0})},
        {"line": line_with(result={"measurement": None, "seconds": 1.0})},
        {"line": line_with(result={"measurement": {**MEASURED, "device_bytes": 10**300}})},
        {"line": line_with(error={"kind": "TrialLost"})},
        {"line": line_with(error={"kind": "TrialLost", "message": 3, "hint": ""})},
        {"line": line_with(error={"kind": "Stopped", "message": "", "hint": ""})},
        {"line": "text"},
        {"log": "text"},
        {"snapshot": "text"},
    ],
)
def test_an_answer_that_is_no_trial_is_a_loss(told, tmp_path, changes):
    with pytest.raises(TrialLost, match="a sends what cannot be read"):
        told(*trained(tmp_path, **changes)).result(WAIT_SECONDS)


def test_an_answer_of_another_kind_is_a_loss(told):
    with pytest.raises(TrialLost, match="a gave an answer that is none"):
        told({"result": 3}, Identify(device="cpu")).result(WAIT_SECONDS)


@pytest.mark.parametrize("kind", [TrialLost, StudyMismatch])
def test_an_error_of_a_task_is_raised_with_its_class_message_and_hint(told, kind):
    error = TaskError(kind=kind.__name__, message="it is gone", hint="bring it back")
    answer = WorkerReply(line=line_of(asdict(TaskReply(error=error))))
    with pytest.raises(AutotuneError) as raised:
        told(answer, Identify(device="cpu")).result(WAIT_SECONDS)
    assert type(raised.value) is kind
    assert (raised.value.message, raised.value.hint) == ("it is gone", "bring it back")
