"""The routes of the queue, with searches that are stand-ins."""

from contextlib import suppress
from pathlib import Path

import pytest

from autotune.analysis.queue_order import DeviceGroup
from autotune.errors import UnknownStudy
from autotune.spec.queued_search import SearchEnd
from autotune.storage.transfer import read_file
from tests.building.queued_searches import running_service, wait_for_end, wait_until
from tests.building.studies import config, definition, keep, measured, open_store

SEARCHES = "/api/v1/searches"


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('service')}/studies/autotune.db"


@pytest.fixture(scope="module")
def client(storage):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAND_IN_SECONDS", "0.02")
        with running_service(storage) as started:
            yield started


def submit(client, headers=None, **settings):
    return client.post(SEARCHES, json=settings, headers=headers)


def long_search(client):
    """A search that runs until it is cancelled, so that what follows it waits."""
    number = submit(client, trials=100_000).json()["id"]
    wait_until(lambda: client.get(f"{SEARCHES}/{number}").json()["state"] == "running")
    return number


@pytest.fixture(autouse=True)
def _empty_queue(client):
    """Cancel what a test has left in the queue."""
    yield
    cancel_everything(client)


def cancel_everything(client):
    active = client.get(SEARCHES, params={"state": ["queued", "running"]}).json()["searches"]
    for search in reversed(active):
        client.post(f"{SEARCHES}/{search['id']}/cancel")
    for search in active:
        wait_for_end(client, search["id"])


def test_a_submission_is_accepted_and_says_where_it_is(client):
    answer = submit(client, space="quick", trials=2, name="accepted")
    assert answer.status_code == 202
    search = answer.json()
    assert (search["state"], search["study"], search["submitted_by"]) == (
        "queued",
        "accepted",
        "owner",
    )
    assert answer.headers["Location"] == f"{SEARCHES}/{search['id']}"
    assert wait_for_end(client, search["id"])["state"] == "finished"


def test_a_repeated_key_is_answered_with_200_and_the_same_search(client):
    key = {"Idempotency-Key": "once"}
    first = submit(client, key, trials=1)
    again = submit(client, key, trials=1)
    other = submit(client, key, trials=2)
    assert [answer.status_code for answer in (first, again, other)] == [202, 200, 409]
    assert first.json()["id"] == again.json()["id"]


def test_what_is_wrong_is_a_problem_with_the_sentence_of_the_command_line(client):
    answer = submit(client, trialz=5)
    assert answer.status_code == 422
    assert answer.headers["Content-Type"] == "application/problem+json"
    problem = answer.json()
    assert problem["type"] == "/problems/invalid-input"
    assert problem["detail"] == "there is no setting 'trialz'"
    assert "did you mean 'trials'" in problem["hint"]


def test_a_submission_that_would_run_code_is_rejected(client):
    answer = submit(client, script="train.py")
    assert answer.status_code == 422
    assert answer.json()["type"] == "/problems/not-allowed"


def test_the_queue_shows_the_place_of_each_search_which_its_priority_changes(client):
    long_search(client)
    first, second = (submit(client, trials=1).json()["id"] for _ in range(2))
    assert client.get(f"{SEARCHES}/{second}").json()["position"] == 2
    answer = client.patch(f"{SEARCHES}/{second}", json={"priority": 9})
    assert (answer.status_code, answer.json()["position"]) == (200, 1)
    queued = client.get(SEARCHES, params={"state": "queued"}).json()
    assert [search["id"] for search in queued["searches"]] == [second, first]


def test_a_search_in_the_queue_says_what_it_waits_for_and_when_it_begins(client):
    running = long_search(client)
    first, second = (submit(client, time_budget="40m").json()["id"] for _ in range(2))
    client.post(f"{SEARCHES}/{running}/cancel")
    wait_until(lambda: client.get(f"{SEARCHES}/{first}").json()["state"] == "running")
    search = client.get(f"{SEARCHES}/{second}").json()
    assert search["waits_for"] == "the group default"
    assert 0.0 < search["begins_in_seconds"] <= 2400.0
    assert "waits for the group default; begins in about" in client.get("/parts/queue").text
    assert client.get(f"{SEARCHES}/{first}").json()["waits_for"] == ""


def test_a_running_search_is_cancelled_with_its_reason(client):
    number = long_search(client)
    answer = client.post(f"{SEARCHES}/{number}/cancel")
    assert answer.status_code == 202
    search = wait_for_end(client, number)
    assert (search["state"], search["reason"]) == ("cancelled", "cancelled by owner")
    assert client.post(f"{SEARCHES}/{number}/cancel").status_code == 202


@pytest.mark.slow
def test_an_ended_search_is_removed_from_the_list(client):
    number = submit(client, trials=1).json()["id"]
    wait_for_end(client, number)
    assert client.post(f"{SEARCHES}/{number}/cancel").status_code == 409
    assert client.delete(f"{SEARCHES}/{number}").status_code == 204
    assert client.get(f"{SEARCHES}/{number}").status_code == 404


@pytest.mark.slow
def test_a_study_is_continued_by_a_new_search_once_the_last_one_has_ended(client):
    number = long_search(client)
    answer = client.post(f"{SEARCHES}/{number}/continue", json={"trials": 3})
    assert answer.status_code == 409
    client.post(f"{SEARCHES}/{number}/cancel")
    before = wait_for_end(client, number)
    answer = client.post(f"{SEARCHES}/{number}/continue", json={"trials": 3})
    assert answer.status_code == 202
    after = answer.json()
    assert after["study"] == before["study"]
    assert after["request"]["trials"] == 3
    wait_for_end(client, after["id"])


@pytest.mark.slow
def test_the_log_of_a_search_is_what_its_process_has_printed(client):
    number = submit(client, trials=1).json()["id"]
    wait_for_end(client, number)
    answer = client.get(f"{SEARCHES}/{number}/log")
    assert (answer.status_code, answer.text) == (200, "no token\n")


def test_actions_say_who_did_what(client):
    number = submit(client, trials=1, name="logged").json()["id"]
    wait_for_end(client, number)
    actions = client.get("/api/v1/actions").json()["actions"]
    assert ("owner", "submit search", str(number), "logged") in [
        (one["who"], one["action"], one["target"], one["detail"]) for one in actions
    ]


# -- studies ---------------------------------------------------------------------------------------


@pytest.fixture
def study(client, storage):
    """A stored study with a trial, and files of its own; its name."""
    name = "by-hand"
    with open_store(storage) as store:
        store.create_study(definition(name), trials_wanted=3)
        attempt = keep(store, config(0), study=name)
        store.attempts.finish(attempt.id, measured(), seconds=1.0)
    folder = client.app.state.service.work_folder / name
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    yield name
    cancel_everything(client)
    for left in (name, "renamed"):
        with suppress(UnknownStudy):
            client.app.state.service.searches.delete_study(left)


def test_a_study_is_renamed_with_its_files(client, study):
    answer = client.patch(f"/api/v1/studies/{study}", json={"name": "renamed"})
    assert (answer.status_code, answer.json()) == (200, {"name": "renamed"})
    folder = client.app.state.service.work_folder
    assert (folder / "renamed" / "logs").is_dir()
    assert not (folder / study).exists()
    assert client.patch(f"/api/v1/studies/{study}", json={"name": "x"}).status_code == 404


def test_a_study_is_not_renamed_to_a_name_that_is_taken_or_impossible(client, study, storage):
    with open_store(storage) as store:
        store.create_study(definition("renamed"), trials_wanted=3)
    taken = client.patch(f"/api/v1/studies/{study}", json={"name": "renamed"})
    impossible = client.patch(f"/api/v1/studies/{study}", json={"name": "../up"})
    assert (taken.status_code, impossible.status_code) == (409, 422)


def test_a_study_is_deleted_on_the_second_request_and_saved_to_a_file_before(client, study):
    address = f"/api/v1/studies/{study}"
    first = client.delete(address)
    assert first.status_code == 409
    problem = first.json()
    assert problem["type"] == "/problems/confirmation-needed"
    assert problem["will_be_deleted"]["trials"] == 1
    wrong = client.delete(address, params={"confirm": "yes"})
    assert wrong.status_code == 409
    second = client.delete(address, params={"confirm": problem["confirm"]})
    assert second.status_code == 200
    (saved,) = read_file(Path(second.json()["exported_to"]))
    assert (saved.name, len(saved.trials)) == (study, 1)
    assert client.delete(address).status_code == 404


def test_the_profiles_of_a_study_are_deleted_with_it(client, study):
    folder = client.app.state.service.work_folder / study
    profile = folder / "profiles" / "trial-0"
    profile.mkdir(parents=True)
    (profile / "trace.json.gz").write_bytes(b"x")
    address = f"/api/v1/studies/{study}"
    first = client.delete(address).json()
    assert "profiles" in first["detail"]
    client.delete(address, params={"confirm": first["confirm"]})
    assert not folder.exists()


def test_a_study_is_not_called_like_a_folder_of_logs(client, study):
    answer = client.patch(f"/api/v1/studies/{study}", json={"name": "logs"})
    assert answer.status_code == 422


@pytest.mark.slow
def test_a_repeated_continuation_makes_one_search(client):
    number = submit(client, trials=1).json()["id"]
    wait_for_end(client, number)
    key = {"Idempotency-Key": "more"}
    answers = [
        client.post(f"{SEARCHES}/{number}/continue", json={"trials": 2}, headers=key)
        for _ in range(2)
    ]
    assert [answer.status_code for answer in answers] == [202, 200]
    assert len({answer.json()["id"] for answer in answers}) == 1


@pytest.mark.parametrize("name", ["deleted", "searches", "work"])
def test_a_study_of_any_name_takes_no_file_of_another_with_it(client, storage, name):
    with open_store(storage) as store:
        for each in (name, "another"):
            store.create_study(definition(each), trials_wanted=3)
    number = wait_for_end(client, submit(client).json()["id"])["id"]
    saved = []
    for each in ("another", name):
        code = client.delete(f"/api/v1/studies/{each}").json()["confirm"]
        answer = client.delete(f"/api/v1/studies/{each}", params={"confirm": code})
        saved.append(Path(answer.json()["exported_to"]))
    assert all(file.is_file() for file in saved)
    assert client.get(f"/api/v1/searches/{number}/log").text


def test_a_study_that_a_search_works_on_is_neither_renamed_nor_deleted(client, study):
    submit(client, name=study, trials=100_000)
    answers = [
        client.patch(f"/api/v1/studies/{study}", json={"name": "renamed"}),
        client.delete(f"/api/v1/studies/{study}"),
    ]
    assert [answer.status_code for answer in answers] == [409, 409]
    assert all(answer.json()["type"] == "/problems/search-conflict" for answer in answers)


def test_devices_show_memory_in_use_and_the_groups(client):
    answer = client.get("/api/v1/devices").json()
    (group,) = answer["groups"]
    assert group["name"] == "default"
    assert all(device["used_bytes"] > 0 for device in answer["devices"])


@pytest.mark.parametrize("more", [{"devices": 2}, {"devices": 2, "trials_per_device": 2}], ids=str)
def test_a_search_for_gpus_that_nobody_has_is_accepted_and_says_what_it_waits_for(client, more):
    search = submit(client, kind="H100", **more).json()
    assert search["waits_for"] == "a worker with H100, and none is there"


def test_actions_say_what_a_study_was_renamed_to_and_of_which_study_a_search_was(client, study):
    client.patch(f"/api/v1/studies/{study}", json={"name": "renamed"})
    number = submit(client, name="fleeting", group="nowhere").json()["id"]
    client.post(f"{SEARCHES}/{number}/cancel")
    client.delete(f"{SEARCHES}/{number}")
    page = client.get("/actions").text
    assert '<td role="cell">to renamed</td>' in page
    assert f'remove search {number}</td><td role="cell">fleeting</td>' in page


def test_the_page_of_a_search_whose_processes_were_lost_says_it_in_sentences(client):
    number = submit(client, group="nowhere").json()["id"]
    searches = client.app.state.service.searches
    run = searches.claim_next(DeviceGroup(machine="elsewhere", name="nowhere"), version="1").run
    end = SearchEnd(state="failed", reason="its process was lost", hint="see the log", exit_code=75)
    searches.end_lost_run(number, run, end)
    page = client.get(f"/searches/{number}").text
    assert "Its process was lost. See the log." in page
    assert "Its processes have written nothing." in page
