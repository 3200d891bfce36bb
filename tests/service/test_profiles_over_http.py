"""The files of profiles over HTTP and on the pages. Nothing is profiled here."""

import os

import pytest

import autotune
from tests.building.profiles import FILES, write_profile_of
from tests.building.queued_searches import running_service
from tests.building.service import TRIALS
from tests.building.studies import write_study

STUDY = "/api/v1/studies/quick"
PROFILE = f"{STUDY}/trials/1/profile"


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    """A study with a profile of its pick."""
    url = f"sqlite:///{tmp_path_factory.mktemp('service')}/studies/autotune.db"
    write_study(url, TRIALS, name="quick")
    write_profile_of(autotune.show("quick", storage=url), 1)
    return url


@pytest.fixture(scope="module")
def client(storage):
    with running_service(storage) as started:
        yield started


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
    assert "with profile" in answer.json()["hint"]
    assert client.get(f"{STUDY}/trials/99/profile").status_code == 404


# -- pages -----------------------------------------------------------------------------------------


def test_the_page_of_a_trial_leads_to_the_files_and_one_without_says_how_to_have_them(client):
    page = client.get("/studies/quick/trials/1").text
    for file in client.get(PROFILE).json()["files"]:
        is_code = file["name"].startswith("code/")
        assert (f'href="{file["path"]}"' in page) is not is_code
    assert f'href="{PROFILE}">all files' in page
    without = client.get("/studies/quick/trials/2").text
    assert "There is no profile of trial 2 of study &#39;quick&#39; on this machine." in without
