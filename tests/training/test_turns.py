"""The turns of a training that shares its device: the socket between it and the search."""

import socket
import threading

import pytest

from autotune.training.turns import Connection, Turns


@pytest.fixture
def listener(tmp_path):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "turns"))
        listening.listen()
        yield listening


@pytest.fixture
def stages():
    return []


@pytest.fixture
def turns(listener, stages):
    with Turns(address=listener.getsockname(), progress=stages.append) as own:
        yield own


def grant(listener, *messages):
    """Start to play the search, which sends these messages and ends; returns what it has got."""
    got = []

    def play():
        connected, _ = listener.accept()
        search = Connection(connected)
        for message in messages:
            got.append(search.receive())
            search.send(message)
        search.close()

    thread = threading.Thread(target=play)
    thread.start()
    return thread, got


def test_a_training_says_that_it_waits_and_that_it_steps(listener, turns, stages):
    search, got = grant(listener, {"steps": 3}, {"steps": 0})
    assert turns.begin(step_seconds=0.5) == 3
    assert stages == ["waiting", "step"]
    assert turns.next(seconds=1.5, tokens=96) == 0
    search.join()
    assert got == [{"step_seconds": 0.5}, {"seconds": 1.5, "tokens": 96}]


def test_a_training_ends_with_its_search(listener, turns, stages):
    search, _ = grant(listener, {"steps": 3})
    turns.begin(step_seconds=0.5)
    search.join()
    assert turns.next(seconds=1.5, tokens=96) == 0
    assert stages[-1] == "step"  # the limits of time hold for its end


def test_a_training_whose_search_has_ended_before_ends_at_once(listener, turns):
    listener.close()
    assert turns.begin(step_seconds=0.5) == 0


def test_a_message_that_has_arrived_in_part_is_kept():
    ours, theirs = socket.socketpair()
    ours.settimeout(0.01)
    connection = Connection(ours)
    theirs.sendall(b'{"seconds": 1.')
    with pytest.raises(TimeoutError):
        connection.receive()
    theirs.sendall(b'5, "tokens": 96}\n{"se')
    assert connection.receive() == {"seconds": 1.5, "tokens": 96}
    theirs.close()
    assert connection.receive() is None
    connection.close()
