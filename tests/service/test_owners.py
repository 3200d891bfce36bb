"""A search and its study belong to who submitted them: others read them, and change nothing."""

import pytest

from autotune.storage.searches import NewSearch
from autotune.storage.tokens import TOKEN_ROLES
from tests.building.service import BEARER, serving, write_example
from tests.building.studies import config, definition, keep, measured
from tests.service.test_who_gets_in import WRITES

WITHOUT_DEVICES = "nowhere"
"""A group that no server has, so that a search of it waits."""
PEOPLE = {"ada": "member", "bob": "member", "root": "admin", "eve": "reader"}

CHANGES = {
    ("PATCH", "/api/v1/searches/{number}"): {"priority": -1},
    ("POST", "/api/v1/searches/{number}/cancel"): None,
    ("POST", "/api/v1/searches/{number}/continue"): {"trials": 1},
    ("DELETE", "/api/v1/searches/{number}"): None,
    ("PATCH", "/api/v1/studies/{name}"): {"name": "renamed"},
    ("DELETE", "/api/v1/studies/{name}"): None,
}
"""The body of each request that changes what belongs to somebody."""
OF_NOBODY = {
    ("POST", "/api/v1/searches"),
    ("POST", "/api/v1/dry-run"),
    ("POST", "/api/v1/predict"),
    ("POST", "/api/v1/fit"),
    ("POST", "/new"),
    ("POST", "/new/plan"),
    ("POST", "/fit/search"),
}
"""Requests that make something new, or only ask."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    storage = f"sqlite:///{tmp_path_factory.mktemp('owners')}/autotune.db"
    write_example(storage)
    with serving(storage) as client:
        yield client


@pytest.fixture(scope="module")
def tokens(served):
    add = served.app.state.service.tokens.add
    return {
        name: {"Authorization": f"Bearer {add(name, role=role)}"} for name, role in PEOPLE.items()
    }


@pytest.fixture
def service(served):
    return served.app.state.service


@pytest.fixture
def of_ada(service):
    """A study of ada with a trial, whose search was cancelled."""
    new = NewSearch(request={"max_mem": "1GiB"}, submitted_by="ada", group=WITHOUT_DEVICES)
    search, _ = service.searches.submit(new)
    service.store.create_study(definition(search.study), trials_wanted=2)
    keep(service.store, config(0), measured(), study=search.study)
    service.searches.cancel(search.id, by="ada")
    return search


def ask(served, headers, route, search):
    method, path = route
    path = path.format(number=search.id, name=search.study)
    return served.request(method, path, headers=headers, json=CHANGES[route])


def test_every_writing_route_says_whether_it_changes_what_is_somebodys():
    assert set(WRITES) == {*CHANGES, *OF_NOBODY}


@pytest.mark.parametrize("route", CHANGES, ids=" ".join)
def test_a_member_changes_nothing_of_somebody_else(served, tokens, of_ada, route):
    answer = ask(served, tokens["bob"], route, of_ada)
    assert (answer.status_code, answer.json()["type"]) == (403, "/problems/not-yours")
    assert "belongs to ada" in answer.json()["detail"]
    assert answer.json()["hint"]


@pytest.mark.parametrize("who", ["ada", "root", "owner"])
@pytest.mark.parametrize("route", CHANGES, ids=" ".join)
def test_the_owner_of_a_search_and_an_admin_may_change_it(served, tokens, of_ada, route, who):
    headers = BEARER if who == "owner" else tokens[who]
    assert ask(served, headers, route, of_ada).status_code != 403


def test_everybody_reads_what_is_anybodys(served, tokens, of_ada):
    for path in (
        f"/api/v1/searches/{of_ada.id}",
        f"/api/v1/searches/{of_ada.id}/log",
        f"/api/v1/studies/{of_ada.study}",
        f"/api/v1/studies/{of_ada.study}/exports",
        f"/studies/{of_ada.study}",
    ):
        for who in ("bob", "eve"):
            assert served.get(path, headers=tokens[who]).status_code == 200, (path, who)


def test_a_study_of_a_terminal_belongs_to_the_owner_of_the_server(served, tokens):
    route = ("/api/v1/studies/quick", {"name": "mine"})
    answer = served.patch(route[0], json=route[1], headers=tokens["ada"])
    assert answer.json()["detail"] == "study quick belongs to owner"


def test_the_name_of_a_study_is_taken_from_its_submission_on(service):
    new = NewSearch(request={}, submitted_by="ada", study="taken", group=WITHOUT_DEVICES)
    search, _ = service.searches.submit(new)
    assert service.searches.owner_of("taken") == "ada"
    service.searches.cancel(search.id, by="ada")


@pytest.mark.parametrize("path", ["/api/v1/searches"])
def test_a_submission_does_not_continue_the_study_of_somebody_else(served, tokens, of_ada, path):
    body = {"name": of_ada.study, "max_mem": "8GiB"}
    answer = served.post(path, json=body, headers=tokens["bob"])
    assert answer.status_code in (403, 409)
    assert served.app.state.service.searches.owner_of(of_ada.study) == "ada"


def test_somebody_elses_study_is_continued_under_a_name_of_ones_own(served, tokens, of_ada):
    path = f"/api/v1/searches/{of_ada.id}/continue"
    answer = served.post(path, json={"name": "of-bob"}, headers=tokens["bob"])
    assert answer.status_code == 202
    found = answer.json()
    assert (found["study"], found["submitted_by"]) == ("of-bob", "bob")
    assert found["request"]["max_mem"] == "1GiB"


def test_a_renamed_study_stays_with_its_owner(served, tokens, service, of_ada):
    route = ("PATCH", "/api/v1/studies/{name}")
    new_name = f"{of_ada.study}-renamed"
    path = route[1].format(name=of_ada.study)
    answer = served.patch(path, json={"name": new_name}, headers=tokens["ada"])
    assert answer.status_code == 200
    assert service.searches.owner_of(new_name) == "ada"


def test_only_an_admin_moves_a_search_before_those_of_others(served, tokens, of_ada):
    for who, status in (("ada", 422), ("root", 202)):
        body = {"priority": 1, "group": "default", "trials": 1}
        answer = served.post("/api/v1/searches", json=body, headers=tokens[who])
        assert answer.status_code == status, answer.text


def test_a_list_of_studies_says_whose_each_is(served, of_ada):
    studies = served.get("/api/v1/studies", headers=BEARER).json()["studies"]
    owners = {study["name"]: study["owner"] for study in studies}
    assert (owners[of_ada.study], owners["quick"]) == ("ada", "owner")


def test_a_page_offers_what_its_reader_may_do(served, tokens, of_ada):
    page = f"/studies/{of_ada.study}"
    offered = {who: served.get(page, headers=tokens[who]).text for who in PEOPLE}
    assert [who for who in PEOPLE if 'data-action="delete"' in offered[who]] == ["ada", "root"]
    assert [who for who in PEOPLE if 'data-action="continue"' in offered[who]] == [
        *("ada", "bob", "root")
    ]
    assert 'data-owner="ada"' in offered["bob"]


def test_every_role_has_somebody():
    assert set(PEOPLE.values()) == set(TOKEN_ROLES)


def test_a_study_takes_no_name_that_somebodys_search_waits_for(served, tokens, service, of_ada):
    new = NewSearch(request={}, submitted_by="bob", study="bobs", group=WITHOUT_DEVICES)
    waiting, _ = service.searches.submit(new)
    path = f"/api/v1/studies/{of_ada.study}"
    answer = served.request("PATCH", path, headers=tokens["ada"], json={"name": "bobs"})
    service.searches.cancel(waiting.id, by="bob")
    assert answer.status_code == 409
    assert service.searches.get(waiting.id).submitted_by == "bob"


# -- names without a study -------------------------------------------------------------------------


@pytest.fixture(params=["cancelled before it began", "with its study deleted"])
def without_study(request, service):
    """A search of ada that has ended, and whose study is not there."""
    new = NewSearch(request={"max_mem": "1GiB"}, submitted_by="ada", group=WITHOUT_DEVICES)
    search, _ = service.searches.submit(new)
    service.searches.cancel(search.id, by="ada")
    if "deleted" in request.param:
        service.store.create_study(definition(search.study), trials_wanted=3)
        service.searches.delete_study(search.study)
    return search


@pytest.mark.parametrize("who", ["ada", "root", "owner"])
def test_a_search_that_never_opened_its_study_stays_with_who_submitted_it(
    served, tokens, service, without_study, who
):
    headers = BEARER if who == "owner" else tokens[who]
    path = f"/api/v1/searches/{without_study.id}/continue"
    answer = served.post(path, json={"trials": 1}, headers=headers)
    assert answer.status_code == 202, answer.text
    assert answer.json()["submitted_by"] == "ada"
    assert service.searches.owner_of(without_study.study) == "ada"


def test_a_search_that_never_opened_its_study_is_continued_by_nobody_else(
    served, tokens, without_study
):
    path = f"/api/v1/searches/{without_study.id}/continue"
    answer = served.post(path, json={"trials": 1}, headers=tokens["bob"])
    assert (answer.status_code, answer.json()["detail"]) == (
        403,
        f"study {without_study.study} belongs to ada",
    )


def test_a_name_without_a_study_is_free_once_its_searches_are_removed(served, tokens, service):
    ended, _ = service.searches.submit(NewSearch(request={}, submitted_by="ada", study="fleeting"))
    service.searches.cancel(ended.id, by="ada")
    body = {"name": "fleeting", "max_mem": "8GiB", "group": WITHOUT_DEVICES}
    before = served.post("/api/v1/searches", json=body, headers=tokens["bob"])
    service.searches.remove(ended.id)
    after = served.post("/api/v1/searches", json=body, headers=tokens["bob"])
    assert (before.status_code, after.status_code) == (403, 202)
