"""A search that is handed to a server trains for real, in a process of its own."""

import os

import psutil
import pytest

from autotune.service.worker import SEARCH_MODULE
from tests.building.queued_searches import running_service, wait_for_end, wait_until

SEARCHES = "/api/v1/searches"
SMALL = {
    "space_content": """
[techniques]
precision = ["fp32"]
checkpointing = ["none", "block"]
micro_batch_size = [2, 4]
""",
    "space": "small",
    "max_mem": "64MiB",
    "layers": 2,
    "width": 16,
    "heads": 2,
    "sequence_length": 16,
    "global_batch": 4,
    "evaluation_sequences": 2,
}

pytestmark = pytest.mark.slow


@pytest.fixture
def client(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    storage = "sqlite:///studies/autotune.db"
    with running_service(storage, search_module=SEARCH_MODULE) as started:
        yield started


def submit(client, **changes):
    return client.post(SEARCHES, json={**SMALL, **changes}).json()["id"]


def events_of(client, number):
    events = client.app.state.service.searches.events_after(0)
    return [event for event in events if event.search == number]


def test_a_submitted_search_ends_with_a_front_and_its_events_tell_how(client):
    number = submit(client, trials=3, name="real", confirm=False)
    search = wait_for_end(client, number)
    assert (search["state"], search["exit_code"], search["trials"]) == ("finished", 0, 3)
    front = client.get("/api/v1/studies/real/front").json()
    assert front["pick"] in front["front"]
    events = events_of(client, number)
    kinds = {event.kind for event in events}
    assert {"search", "opened", "trial_began", "step", "trial_ended", "front"} <= kinds
    ended = [event.data["trial"] for event in events if event.kind == "trial_ended"]
    stored = client.get("/api/v1/studies/real/trials").json()["trials"]
    peaks = {trial["number"]: trial["peak_memory_bytes"] for trial in stored}
    assert {trial["number"]: trial["peak_memory_bytes"] for trial in ended} == peaks
    last = [event.data for event in events if event.kind == "front"][-1]
    assert (last["front"], last["pick"]) == (front["front"], front["pick"])


def test_a_cancelled_search_takes_its_trial_with_it(client):
    number = submit(client, trials=3, steps=100_000)
    wait_until(lambda: any(event.kind == "step" for event in events_of(client, number)))
    process = psutil.Process(client.app.state.service.searches.get(number).process.pid)
    family = [process, *process.children(recursive=True)]
    client.post(f"{SEARCHES}/{number}/cancel")
    assert wait_for_end(client, number)["state"] == "cancelled"
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []


def test_a_search_that_is_killed_goes_on_with_what_is_left_of_its_time(client):
    number = submit(client, trials=4, name="killed", time_budget="10m", confirm=False)
    searches = client.app.state.service.searches
    wait_until(lambda: any(event.kind == "trial_ended" for event in events_of(client, number)))
    # A sign of life says how long it has been running.
    wait_until(lambda: searches.get(number).progress.get("used_seconds", 0.0) > 2.0)
    os.killpg(searches.get(number).process.pid, 9)
    search = wait_for_end(client, number)
    assert (search["state"], search["starts"], search["trials"]) == ("finished", 2, 4)
    progress = searches.get(number).progress
    assert progress["used_seconds"] > 2.0
    assert progress["time_budget_seconds"] == 600.0
    numbers = [trial["number"] for trial in client.get("/api/v1/studies/killed").json()["trials"]]
    assert numbers == [0, 1, 2, 3]


def test_a_search_that_was_killed_leaves_only_its_log(client, tmp_path):
    number = submit(client, trials=2, confirm=False)
    wait_until(lambda: any(event.kind == "trial_began" for event in events_of(client, number)))
    os.killpg(client.app.state.service.searches.get(number).process.pid, 9)
    assert wait_for_end(client, number)["starts"] == 2
    folder = tmp_path / "studies" / "work" / "autotune" / ".searches"
    assert [path.name for path in folder.iterdir()] == [f"{number}.log"]


def test_a_study_that_exists_is_not_submitted_with_other_settings(client):
    wait_for_end(client, submit(client, trials=1, name="a"))
    answer = client.post(SEARCHES, json={**SMALL, "trials": 2, "name": "a", "layers": 3})
    assert answer.status_code == 409
    assert "layers" in answer.json()["detail"] + answer.json()["hint"]


def test_a_search_that_cannot_begin_fails_with_the_sentence_of_the_command_line(client):
    first = submit(client, trials=1, name="b")
    second = submit(client, trials=1, name="b", layers=3)  # there is no study of the name yet
    wait_for_end(client, first)
    search = wait_for_end(client, second)
    assert (search["state"], search["exit_code"]) == ("failed", 2)
    assert "layers" in search["reason"] + search["hint"]


def test_a_pick_is_profiled_at_the_end_and_no_number_changes(client):
    search = submit(client, trials=2, name="real", confirm=False, profile="pick")
    wait_for_end(client, search)
    study = client.get("/api/v1/studies/real").json()
    (profile,) = client.get("/api/v1/studies/real/profiles").json()["profiles"]
    assert profile["trial"] == study["pick"]
    numbers = client.get(f"{profile_path(study['pick'])}/profile.json").json()
    peaks = {trial["number"]: trial["peak_memory_bytes"] for trial in study["trials"]}
    assert numbers["peak_memory_bytes"] == peaks[study["pick"]]
    notices = [
        event.data["message"] for event in events_of(client, search) if event.kind == "notice"
    ]
    assert f"Note: Profiling trial {study['pick']} of real." in notices


def profile_path(trial):
    return f"/api/v1/studies/real/trials/{trial}/profile"
