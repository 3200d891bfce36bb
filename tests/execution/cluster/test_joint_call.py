"""What a training on several nodes finds, from what each of them does."""

import time
from concurrent.futures import Future, wait

import pytest

from autotune.errors import TrialLost
from autotune.execution.cluster import joint_call
from autotune.execution.cluster.joint_call import Part, joined
from autotune.spec.attempt import FinishedTrial
from autotune.spec.parity import NoTrace
from autotune.spec.result import Measurement

BROKE = "RuntimeError: Connection closed by peer [10.0.0.2]:4000"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(joint_call, "SECONDS_FOR_OTHERS", 0.3)
    monkeypatch.setattr(joint_call, "SECONDS_TO_SAY_WHY", 0.6)
    monkeypatch.setattr(joint_call, "_SECONDS_TO_END", 0.2)


class Nodes:
    """Two nodes with a part of a training each."""

    def __init__(self):
        self.futures = [Future(), Future()]
        self.cancelled = []
        self.joint = joined(
            [
                Part(future=future, cancel=lambda name=name: self.cancelled.append(name))
                for name, future in zip("ab", self.futures, strict=True)
            ]
        )

    def end(self, number, outcome, message="", **measured):
        measurement = Measurement(outcome=outcome, message=message, **measured)
        self.futures[number].set_result(FinishedTrial(measurement=measurement, seconds=1.0))

    @property
    def measured(self):
        return self.joint.result(timeout=10).measurement


@pytest.fixture
def nodes():
    return Nodes()


def test_the_memory_of_all_ranks_is_known_and_that_of_the_worst_counts(nodes):
    nodes.end(1, "ok", peak_memory_bytes=30, peak_memory_bytes_by_rank=(30, 20), device_bytes=30)
    nodes.end(0, "ok", peak_memory_bytes=12, peak_memory_bytes_by_rank=(10, 12), device_bytes=12)
    assert nodes.measured.peak_memory_bytes_by_rank == (10, 12, 30, 20)
    assert nodes.measured.peak_memory_bytes == nodes.measured.device_bytes == 30


def test_a_rank_over_the_cap_on_any_node_is_over_the_cap(nodes):
    nodes.end(0, "ok", peak_memory_bytes=12, device_bytes=12)
    nodes.end(1, "over_cap", "rank 1 on b: over", peak_memory_bytes=30, device_bytes=30)
    assert (nodes.measured.outcome, nodes.measured.message) == ("over_cap", "rank 1 on b: over")
    assert nodes.cancelled == []


def test_a_node_that_lost_another_is_not_to_blame(nodes):
    nodes.end(0, "crashed", f"rank 0 on a: {BROKE}")
    time.sleep(0.3)
    nodes.end(1, "out_of_memory", "rank 1 on b: no memory")
    assert (nodes.measured.outcome, nodes.measured.message) == (
        "out_of_memory",
        "rank 1 on b: no memory",
    )


def test_a_node_that_fails_ends_the_others(nodes):
    nodes.end(1, "out_of_memory", "rank 1 on b: no memory")
    assert nodes.measured.outcome == "out_of_memory"
    assert nodes.cancelled == ["a"]


def test_a_lost_node_loses_the_trial(nodes):
    nodes.futures[1].set_exception(TrialLost("the node of b has left the cluster"))
    nodes.end(0, "crashed", f"rank 0 on a: {BROKE}")
    with pytest.raises(TrialLost, match="the node of b has left"):
        nodes.joint.result(timeout=10)


def test_where_no_node_says_why_the_network_between_them_broke(nodes):
    nodes.end(0, "crashed", f"rank 0 on a: {BROKE}")
    nodes.end(1, "crashed", f"rank 1 on b: {BROKE}")
    with pytest.raises(TrialLost, match=r"connection between the nodes .* rank 0 on a"):
        nodes.joint.result(timeout=10)


def test_a_silent_node_is_not_waited_for_for_ever(nodes):
    nodes.end(0, "crashed", f"rank 0 on a: {BROKE}")
    with pytest.raises(TrialLost, match="connection between the nodes"):
        nodes.joint.result(timeout=10)
    assert nodes.cancelled == ["b"]


def test_at_a_time_limit_every_node_says_what_its_ranks_did(nodes):
    nodes.end(0, "timeout", "the step took too long: rank 0 on a was in all_reduce")
    nodes.end(1, "timeout", "the step took too long: rank 1 on b was in forward")
    assert nodes.measured.message.count("was in") == 2


def test_first_steps_that_fail_on_another_node_have_no_trace(nodes):
    nodes.futures[0].set_result("a trace")
    nodes.futures[1].set_result(NoTrace(outcome="out_of_memory", message="rank 1 on b: no memory"))
    assert nodes.joint.result(timeout=10).message == "rank 1 on b: no memory"


def test_what_is_no_measurement_is_that_of_the_first_node(nodes):
    nodes.futures[1].set_result("another trace")
    nodes.futures[0].set_result("a trace")
    wait([nodes.joint], timeout=10)
    assert nodes.joint.result() == "a trace"
