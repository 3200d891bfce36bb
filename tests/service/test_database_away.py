"""A database that is away for a while: requests say so, and the queue goes on when it is back."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

import autotune
from autotune.analysis.queue_order import DeviceGroup
from autotune.service import search_process, stream
from autotune.service.processes import start_process, stop_process
from autotune.service.worker import SEARCH_MODULE
from autotune.storage.searches import NewSearch, Searches
from autotune.storage.store import StudyStore
from tests.building.listening_service import listening_service
from tests.building.queued_searches import TOKEN, running_service, wait_for_end, wait_until

SEARCHES = "/api/v1/searches"

pytestmark = pytest.mark.slow


@pytest.fixture
def client(postgres_url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAND_IN_SECONDS", "0.2")
    with running_service(postgres_url) as started:
        yield started


def trials_of(client, number):
    events = client.app.state.service.searches.events_after(0)
    ended = [event for event in events if event.kind == "trial_ended" and event.search == number]
    return [event.data["trial"]["number"] for event in ended]


def test_while_it_is_away_requests_are_answered_with_503_and_a_hint(client, postgres):
    postgres.stop(mode="immediate")
    try:
        for path in (SEARCHES, "/api/v1/studies", "/api/v1/devices", "/api/v1/actions"):
            answer = client.get(path)
            assert answer.status_code == 503
            assert answer.headers["Retry-After"]
            assert answer.json()["detail"]
        assert client.post(SEARCHES, json={"trials": 1}).status_code == 503
        wait_until(lambda: client.get("/api/v1/health").status_code == 503)
        health = client.get("/api/v1/health").json()
        assert (health["status"], health["database"]) == ("unavailable", "unreachable")
        measured = client.get("/metrics")
        assert measured.status_code == 200
        assert "autotune_database_up 0" in measured.text.splitlines()
    finally:
        postgres.start()
    wait_until(lambda: client.get("/api/v1/health").status_code == 200)
    assert client.get(SEARCHES).status_code == 200


def test_a_search_whose_database_is_away_is_resumed_and_nothing_is_lost_or_doubled(
    client, postgres
):
    number = client.post(SEARCHES, json={"trials": 20}).json()["id"]
    wait_until(lambda: trials_of(client, number))
    postgres.stop(mode="immediate")
    postgres.start()
    wait_until(lambda: client.get("/api/v1/health").status_code == 200)
    assert wait_for_end(client, number)["state"] == "finished"
    assert trials_of(client, number) == list(range(20))


def test_a_submission_is_made_once_the_database_is_back(client, postgres):
    postgres.stop(mode="immediate")
    key = {"Idempotency-Key": "one"}
    assert client.post(SEARCHES, json={"trials": 1}, headers=key).status_code == 503
    postgres.start()
    wait_until(lambda: client.get("/api/v1/health").status_code == 200)
    first = client.post(SEARCHES, json={"trials": 1}, headers=key)
    again = client.post(SEARCHES, json={"trials": 1}, headers=key)
    assert (first.status_code, again.status_code) == (202, 200)
    assert wait_for_end(client, first.json()["id"])["state"] == "finished"


@pytest.fixture
def order(postgres_url, tmp_path):
    """That of a search which a worker has just taken from the queue."""
    with closing(StudyStore(postgres_url, create=True)) as store:
        queue = Searches(store.database)
        queue.submit(NewSearch(request={}, submitted_by="ada"))
        search = queue.claim_next(DeviceGroup(machine="here"), version="1")
    return {"storage": postgres_url, "search": search.id, "run": search.run, "rules": {}}


def test_a_search_begins_once_the_database_is_back(order, postgres, capsys):
    with ThreadPoolExecutor(1) as pool:
        with postgres.stopped(mode="immediate"):
            begun = pool.submit(search_process._begin, order, [])
            wait_until(lambda: "waiting for it" in capsys.readouterr().out or begun.done())
        _, search = begun.result()
    assert search.id == order["search"]


def test_a_search_that_waits_for_its_database_ends_when_it_is_stopped(order, postgres, tmp_path):
    log = tmp_path / "log"
    with postgres.stopped(mode="immediate"):
        started = start_process(SEARCH_MODULE, order, log_file=log)
        wait_until(lambda: "waiting for it" in log.read_text() or started.how_it_ended())
        stop_process(started.process)
        wait_until(started.how_it_ended)
    assert "exit code 75" in started.how_it_ended()
    assert "Traceback" not in log.read_text()


QUICK_SEARCH = "tests.building.quick_search_process"
AWAY_SECONDS = 30
"""More than the 12 s after which a client once gave up."""


def test_clients_that_wait_hold_out_until_the_database_is_back(
    postgres, postgres_url, tmp_path, monkeypatch
):
    monkeypatch.setenv("STAND_IN_SECONDS", "0.2")
    monkeypatch.setattr(stream, "SIGN_OF_LIFE_SECONDS", 1.0)
    told, events = [], []
    with (
        listening_service(postgres_url, search_module=QUICK_SEARCH) as url,
        autotune.Client(url, TOKEN) as client,
    ):

        def command(*words):
            environment = {"AUTOTUNE_TOKEN": TOKEN}
            return subprocess.Popen(
                [sys.executable, "-m", "autotune", *words, "--server", url],
                cwd=tmp_path,
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

        searching = command("search", "--space", "quick", "--trials", "20", "--name", "away")
        wait_until(lambda: client.searches(study="away"))
        (search,) = client.searches(study="away")
        watching = command("watch", str(search.id))
        reader = threading.Thread(
            target=lambda: events.extend(client.watch(search.id, on_wait=told.append)), daemon=True
        )
        reader.start()
        wait_until(lambda: any(event.kind == "trial_ended" for event in events))
        with postgres.stopped(mode="immediate"):
            time.sleep(AWAY_SECONDS)
        for waiting in (searching, watching):
            output, _ = waiting.communicate(timeout=120)
            assert waiting.returncode == 0, output
        reader.join(60)
        ended = [event for event in events if event.kind == "trial_ended"]
        assert [event.data["trial"]["number"] for event in ended] == list(range(20))
        assert len(told) == 1
