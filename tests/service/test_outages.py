"""Every call of the client that waits holds out for an outage, whichever request it hits."""

import math
import uuid

import pytest

import autotune
from autotune.client import connection
from autotune.errors import ServerUnreachable, StorageUnreachable
from tests.building.commands import run_here
from tests.building.listening_service import listening_service
from tests.building.outages import OutageProxy
from tests.building.queued_searches import TOKEN

LASTS = 6
"""Requests in a row: more than those by which a brief failure is waited out."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    storage = f"sqlite:///{tmp_path_factory.mktemp('outages')}/studies/autotune.db"
    with listening_service(storage) as url:
        yield url


@pytest.fixture(scope="module")
def ended(server):
    """The number of a search that has ended."""
    with autotune.Client(server, TOKEN) as client:
        return client.wait(client.submit(trials=2, name="made", space="quick").id).id


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(connection, "_BRIEF_SECONDS", 0.0)
    monkeypatch.setattr(connection, "_FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(connection, "_LONGEST_WAIT_SECONDS", 0.001)


def called(call):
    """Returns a function of (client, number of a search, folder) that makes the call."""

    def run(client, number, folder):
        client.health()  # which the outage does not hit: the server was reached
        return call(client, number)

    return run


def command(*words):
    """Returns a function that runs a command for its code and its output."""

    def run(client, number, folder):
        named = [str(number) if word == "SEARCH" else word for word in words]
        if "NEW" in words:
            named[named.index("NEW")] = f"new-{uuid.uuid4().hex[:8]}"
        environment = {"AUTOTUNE_SERVER": client.url, "AUTOTUNE_TOKEN": TOKEN}
        done = run_here(*named, "--server", client.url, folder=folder, **environment)
        return done.returncode, bool(done.stdout), done.stderr if done.returncode else ""

    return run


CALLS = {
    "watch": called(lambda client, number: [event.id for event in client.watch(number)]),
    "wait": called(lambda client, number: client.wait(number).state),
    "patient show": called(lambda client, number: len(client.patient().show("made").trials)),
    "patient search": called(lambda client, number: client.patient().search(number).state),
    "autotune watch": pytest.param(command("watch", "SEARCH"), marks=pytest.mark.slow),
    "autotune search": pytest.param(
        command("search", "--trials", "1", "--space", "quick", "--name", "NEW"),
        marks=pytest.mark.slow,
    ),
}
waiting_calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
kinds_of_outage = pytest.mark.parametrize("closes", [False, True], ids=["503", "closed"])


def outcome(server, call, number, folder, **outage):
    """Returns what a call returns through an outage, and the proxy that had it."""
    with (
        OutageProxy(server, **outage) as proxy,
        autotune.Client(proxy.url, TOKEN) as client,
    ):
        return call(client, number, folder), proxy


@waiting_calls
@kinds_of_outage
def test_a_waiting_call_is_the_same_with_an_outage_at_any_of_its_requests(
    call, closes, server, ended, tmp_path
):
    plain, proxy = outcome(server, call, ended, tmp_path, begins=0, lasts=0, closes=closes)
    for begins in range(1, proxy.requests):
        found, hit = outcome(
            server, call, ended, tmp_path, begins=begins, lasts=LASTS, closes=closes
        )
        assert (found, hit.refused) == (plain, LASTS), f"at request {begins}"


@waiting_calls
@kinds_of_outage
def test_a_waiting_call_says_an_outage_without_end_in_a_sentence_with_exit_code_75(
    call, closes, server, ended, tmp_path, monkeypatch
):
    monkeypatch.setattr(connection, "GIVE_UP_SECONDS", 0.05)
    try:
        found, _ = outcome(server, call, ended, tmp_path, begins=1, lasts=math.inf, closes=closes)
    except (ServerUnreachable, StorageUnreachable) as error:
        found = error.exit_code, False, f"error: {error.message}\n"
    code, _, stderr = found
    assert (code, stderr.count("error: ")) == (75, 1)
    assert "Traceback" not in stderr


def test_a_server_that_was_never_reached_is_not_waited_for(server, ended):
    with (
        OutageProxy(server, begins=0, lasts=math.inf, closes=True) as proxy,
        autotune.Client(proxy.url, TOKEN) as client,
        pytest.raises(ServerUnreachable),
    ):
        client.wait(ended)


def test_an_outage_is_told_once(server, ended):
    told = []
    with (
        OutageProxy(server, begins=1, lasts=LASTS, closes=False) as proxy,
        autotune.Client(proxy.url, TOKEN) as client,
    ):
        client.health()
        for _ in client.watch(ended, on_wait=told.append):
            pass
    assert told == ["the studies database cannot be reached"]
