"""The connection to a Ray cluster, of which the head may no longer answer."""

import threading
import time
from contextlib import closing

import pytest

from autotune.errors import TrialLost

pytest.importorskip("ray")

from ray.exceptions import AuthenticationError

from autotune.execution.cluster import connection


@pytest.fixture
def answers(monkeypatch):
    """Let the head answer until the event is set; after that its call blocks, as Ray's does."""
    silent, ended = threading.Event(), threading.Event()

    def alive_nodes():
        if silent.is_set():
            ended.wait()
        return {"a": {"Alive": True}}

    monkeypatch.setattr(connection, "alive_nodes", alive_nodes)
    monkeypatch.setattr(connection, "_SECONDS_BETWEEN_QUESTIONS", 0.01)
    monkeypatch.setattr(connection, "SECONDS_WITHOUT_HEAD", 0.2)
    yield silent
    ended.set()


def wait_until(is_so):
    end = time.monotonic() + 5
    while not is_so() and time.monotonic() < end:
        time.sleep(0.01)
    assert is_so()


def test_a_head_that_answers_is_not_lost(answers):
    with closing(connection.Connection("head:6379")) as connected:
        wait_until(lambda: connected.nodes is not None)
        time.sleep(0.3)
        connected.check()


def test_a_head_that_does_not_answer_is_lost_with_what_to_do(answers):
    with closing(connection.Connection("head:6379")) as connected:
        wait_until(lambda: connected.nodes is not None)
        answers.set()
        wait_until(lambda: connected.is_lost)
        with pytest.raises(TrialLost, match="head:6379 does not answer") as raised:
            connected.check()
        assert "run the same command again" in raised.value.hint
        assert raised.value.exit_code == 75


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("WrongClusterID: the client is accessing GCS after it has restarted", "was started anew"),
        ("the token is another one", "is lost"),
    ],
)
def test_a_call_that_fails_because_the_cluster_is_gone_ends_the_search_with_what_to_do(
    message, said, answers, monkeypatch
):
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    with (
        pytest.raises(TrialLost, match=f"head:6379 {said}") as raised,
        connection.connected("head:6379"),
    ):
        raise AuthenticationError(message)
    assert "run the same command again" in raised.value.hint
    assert raised.value.exit_code == 75


def test_a_head_that_answers_again_is_not_lost(answers, monkeypatch):
    with closing(connection.Connection("head:6379")) as connected:
        raises = {"now": False}

        def alive_nodes():
            if raises["now"]:
                raise RuntimeError("RPC error: deadline exceeded")
            return {}

        monkeypatch.setattr(connection, "alive_nodes", alive_nodes)
        raises["now"] = True
        wait_until(lambda: connected.is_lost)
        raises["now"] = False
        wait_until(lambda: not connected.is_lost)
