"""What a node answers is checked where it arrives: a failure later would end no request."""

import pytest

from autotune.spec.attempt import FinishedTrial
from tests.building.studies import measured

pytest.importorskip("ray")

from autotune.execution.cluster.remote_worker import checked_value
from autotune.execution.cluster.worker import WorkerReply


def trained(**changes):
    finished = FinishedTrial(measurement=measured(), seconds=1.0)
    return {"finished": finished, "log": b"", "snapshot": None, **changes}


def test_an_impossible_number_of_a_node_is_none():
    measurement = measured(peak_memory_bytes=10**300, final_loss=float("nan"))
    value = trained(finished=FinishedTrial(measurement=measurement, seconds=1.0))
    found = checked_value(WorkerReply(value=value), "train")["finished"].measurement
    assert (found.peak_memory_bytes, found.final_loss) == (None, None)
    assert found.tokens_per_second == 1000.0


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        trained(log="text"),
        trained(snapshot="text"),
        trained(finished=None),
        trained(finished=FinishedTrial(measurement=measured(), seconds=-1.0)),
        trained(finished=FinishedTrial(measurement=measured(outcome="splendid"), seconds=1.0)),
        trained(finished=FinishedTrial(measurement=None, seconds=1.0)),
    ],
)
def test_an_answer_that_is_no_trial_is_an_error(value):
    with pytest.raises((ValueError, TypeError, LookupError, AttributeError)):
        checked_value(WorkerReply(value=value), "train")


@pytest.mark.parametrize("error", [("TrialLost",), "TrialLost", ("TrialLost", 3, "")])
def test_an_error_that_has_no_message_is_an_error(error):
    with pytest.raises(ValueError, match="error"):
        checked_value(WorkerReply(error=error), "identify")
