"""The routes of profiles: their files, and how one is asked for. Nothing is profiled here."""

import os

import pytest

import autotune
from tests.building.profiles import FILES, write_profile_of
from tests.building.queued_searches import running_service, wait_for_end, wait_until
from tests.building.service import TRIALS
from tests.building.studies import write_study

STUDY = "/api/v1/studies/quick"
PROFILE = f"{STUDY}/trials/1/profile"
SEARCHES = "/api/v1/searches"


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    """A study with a profile of its pick."""
    url = f"sqlite:///{tmp_path_factory.mktemp('service')}/studies/autotune.db"
    write_study(url, TRIALS, name="quick")
    write_profile_of(autotune.show("quick", storage=url), 1)
    return url


@pytest.fixture(scope="module")
def client(storage):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAND_IN_SECONDS", "0.02")
        with running_service(storage) as started:
            yield started


@pytest.fixture
def busy(client):
    """The service while a search runs on its devices, so that whatever comes waits."""
    number = client.post(SEARCHES, json={"trials": 100_000}).json()["id"]
    wait_until(lambda: client.get(f"{SEARCHES}/{number}").json()["state"] == "running")
    yield client
    active = client.get(SEARCHES, params={"state": ["queued", "running"]}).json()["searches"]
    for search in reversed(active):
        client.post(f"{SEARCHES}/{search['id']}/cancel")
        wait_for_end(client, search["id"])


# -- files -----------------------------------------------------------------------------------------


def test_the_profiles_of_a_study_are_listed_with_their_files(client):
    answer = client.get(f"{STUDY}/profiles").json()
    (profile,) = answer["profiles"]
    sizes = {file["name"]: file["bytes"] for file in profile["files"]}
    assert {name: sizes[name] for name in FILES} == {
        name: len(content) for name, content in FILES.items()
    }
    assert answer["bytes"] == profile["bytes"] == sum(sizes.values())
    assert (profile["trial"], profile["steps"]) == (1, 3)
    assert client.get(PROFILE).json() == profile


def test_every_listed_file_is_where_the_list_says(client):
    for file in client.get(PROFILE).json()["files"]:
        answer = client.get(file["path"])
        assert answer.status_code == 200
        assert len(answer.content) == file["bytes"]


@pytest.mark.parametrize(
    ("name", "kind", "disposition"),
    [
        ("trace.json.gz", "application/gzip", "attachment"),
        ("snapshot.pickle", "application/octet-stream", "attachment"),
        ("profile.json", "application/json", "inline"),
        ("memory.html", "text/html; charset=utf-8", "inline"),
        ("code/graph-0.py", "text/plain; charset=utf-8", "inline"),
    ],
)
def test_a_file_is_sent_as_what_it_is(client, name, kind, disposition):
    answer = client.get(f"{PROFILE}/{name}")
    assert answer.headers["content-type"] == kind
    assert answer.headers["content-disposition"].startswith(f"{disposition};")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "content-encoding" not in answer.headers


def test_the_page_of_a_profile_is_shown_in_a_sandbox(client):
    assert "sandbox" in client.get(f"{PROFILE}/memory.html").headers["content-security-policy"]


def test_what_is_no_file_of_the_profile_is_not_sent(client, storage, tmp_path):
    folder = autotune.show("quick", storage=storage).folder / "profiles" / "trial-1"
    secret = tmp_path / "secret.json"
    secret.write_text("x")
    os.symlink(secret, folder / "linked.json")
    for name in (
        "linked.json",
        "code",
        "nothing.json",
        "%2e%2e/%2e%2e/prepared",
        "code//graph-0.py",
    ):
        assert client.get(f"{PROFILE}/{name}").status_code == 404
    (folder / "linked.json").unlink()


def test_a_trial_without_a_profile_says_how_to_have_one(client):
    answer = client.get(f"{STUDY}/trials/2/profile")
    assert answer.status_code == 404
    assert "POST" in answer.json()["hint"]
    assert client.get(f"{STUDY}/trials/99/profile").status_code == 404


# -- asking for a profile --------------------------------------------------------------------------


def test_a_profile_waits_in_the_queue_until_the_search_before_it_has_ended(busy):
    answer = busy.post(f"{STUDY}/trials/2/profile", json={"steps": 5})
    assert answer.status_code == 202
    job = answer.json()
    assert (job["state"], job["position"], job["study"]) == ("queued", 1, "quick")
    assert (job["profiled_trial"], job["request"]["steps"]) == (2, 5)
    assert answer.headers["location"] == f"{SEARCHES}/{job['id']}"
    assert busy.get(f"{SEARCHES}/{job['id']}").json()["state"] == "queued"


def test_a_profile_that_waits_already_is_not_queued_again(busy):
    first, second = (busy.post(PROFILE, json={"fresh": True}) for _ in range(2))
    assert (first.status_code, second.status_code) == (202, 200)
    assert first.json()["id"] == second.json()["id"]


def test_a_study_is_not_deleted_while_a_profile_of_it_waits(busy):
    number = busy.post(PROFILE, json={"fresh": True}).json()["id"]
    answer = busy.delete(STUDY)
    assert answer.status_code == 409
    assert f"search {number} of study quick is queued" in answer.json()["detail"]


def test_a_profile_is_not_taken_for_the_search_of_its_study(client):
    number = client.post(PROFILE).json()["id"]
    wait_for_end(client, number)
    (study,) = client.get("/api/v1/studies", params={"query": "quick"}).json()["studies"]
    assert study["state"] is None
    assert client.post(f"{SEARCHES}/{number}/continue").status_code == 409


def test_who_asked_for_a_profile_is_in_the_log_of_actions(client):
    wait_for_end(client, client.post(PROFILE).json()["id"])
    actions = client.get("/api/v1/actions").json()["actions"]
    assert ("profile trial", "quick/1") in [(one["action"], one["target"]) for one in actions]


@pytest.mark.parametrize(
    ("trial", "body", "status", "sentence"),
    [
        (3, {}, 422, "never came to a steady step"),
        (4, {}, 422, "it has not ended yet"),
        (99, {}, 404, "no trial 99"),
        (1, {"steps": 0}, 422, "steps"),
        (1, {"steps": 101}, 422, "steps"),
        (1, {"group": "nowhere"}, 422, "Invalid group: 'nowhere'"),
        (1, {"out": "/tmp"}, 422, "out"),
    ],
)
def test_what_cannot_be_profiled_is_not_queued(client, trial, body, status, sentence):
    answer = client.post(f"{STUDY}/trials/{trial}/profile", json=body)
    assert answer.status_code == status
    assert sentence in answer.text
    assert client.get(SEARCHES, params={"state": "queued"}).json()["total"] == 0


def test_nothing_is_profiled_where_trials_run_on_a_cluster(storage):
    with running_service(storage, ray="auto") as client:
        answer = client.post(PROFILE)
    assert answer.status_code == 422
    assert "Ray" in answer.json()["detail"]


# -- pages -----------------------------------------------------------------------------------------


def test_the_pages_of_a_study_and_of_a_trial_lead_to_the_files(client):
    for address in ("/studies/quick", "/studies/quick/trials/1"):
        page = client.get(address).text
        for name in FILES:
            assert f'href="{PROFILE}/{name}"' in page


def test_a_trial_has_a_button_for_its_profile_and_one_that_cannot_says_why(client):
    assert "Profile trial #1 again" in client.get("/studies/quick/trials/1").text
    assert "Profile trial #2…" in client.get("/studies/quick/trials/2").text
    failed = client.get("/studies/quick/trials/3").text
    assert 'data-action="profile"' not in failed
    assert "never came to a steady step" in failed


def test_the_page_of_a_trial_shows_its_profile_in_the_queue(busy):
    number = busy.post(f"{STUDY}/trials/2/profile").json()["id"]
    page = busy.get("/studies/quick/trials/2").text
    assert "It is number 1" in page or "it is number 1 in the queue" in page
    assert f'data-search="{number}"' in page
    assert 'data-action="profile"' not in page
    assert f'data-search="{number}"' not in busy.get("/studies/quick/trials/1").text
    assert "profile of #2 of quick" in busy.get("/").text


def test_the_page_of_a_profile_that_was_asked_for_leads_to_its_trial(client):
    number = client.post(PROFILE).json()["id"]
    wait_for_end(client, number)
    answer = client.get(f"/searches/{number}", follow_redirects=False)
    assert answer.headers["location"] == "/studies/quick/trials/1#profiles"
    assert "Continue with more trials" not in client.get(f"/searches/{number}?log=1").text


def test_the_page_of_a_trial_says_why_its_profile_was_not_taken(tmp_path):
    storage = f"sqlite:///{tmp_path}/autotune.db"
    write_study(storage, TRIALS, name="quick")
    with running_service(storage, search_module="tests.building.profile_stand_in") as client:
        number = client.post(f"{STUDY}/trials/2/profile", json={"steps": 13}).json()["id"]
        assert wait_for_end(client, number)["state"] == "failed"
        page = client.get("/studies/quick/trials/2").text
        assert "A profile was not taken. No luck. Try 12." in page
        assert "not taken" not in client.get("/studies/quick/trials/1").text
