"""A database that is away for a while: requests say so, and the queue goes on when it is back."""

import pytest

from tests.building.queued_searches import running_service, wait_for_end, wait_until

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
