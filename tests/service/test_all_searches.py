"""The pages of all searches and of who did what: filtered, by pages, as their address says."""

import re

import pytest

from autotune.storage.searches import NewSearch
from tests.building.service import BEARER, serving

PAGE = {**BEARER, "Accept": "text/html"}
OF_ADA = 30
"""More than a page has."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(f"sqlite:///{tmp_path_factory.mktemp('searches')}/autotune.db") as client:
        searches = client.app.state.service.searches
        tokens = client.app.state.service.tokens
        for number in range(OF_ADA):
            # Of a group that no server has, so that it waits.
            new = NewSearch(
                request={}, submitted_by="ada", study=f"of-ada-{number}", group="nowhere"
            )
            search, _ = searches.submit(new)
            tokens.record_action(who="ada", action="submit search", target=str(search.id))
        search, _ = searches.submit(
            NewSearch(request={}, submitted_by="bob", study="of-bob", group="nowhere")
        )
        searches.cancel(search.id, by="bob")
        tokens.record_action(who="bob", action="cancel search", target=str(search.id))
        tokens.record_action(who="bob", action="delete study", target="7", detail="7.db")
        yield client


def shown(served, path):
    """Returns the studies, or the people, of the rows of a page."""
    text = served.get(path, headers=PAGE).text
    return re.findall(r'<th role="rowheader" scope="row">(?:<a [^>]*>)?([\w-]+)', text)


def test_the_searches_of_a_person_in_a_state_are_shown(served):
    assert shown(served, "/searches?by=bob") == ["of-bob"]
    assert shown(served, "/searches?state=cancelled") == ["of-bob"]
    assert shown(served, "/searches?state=cancelled&by=ada") == []
    assert len(shown(served, "/searches?state=queued&by=ada")) == 25


def test_mine_are_those_of_who_has_signed_in(served):
    token = served.app.state.service.tokens.add("bob")
    headers = {"Authorization": f"Bearer {token}"}
    page = served.get("/searches", headers=headers).text
    assert 'href="/searches?by=bob">Mine</a>' in page
    assert 'href="/searches?by=owner">Mine</a>' in served.get("/searches", headers=PAGE).text
    assert shown(served, "/searches?by=owner") == []


def test_every_search_is_on_one_page(served):
    first, second = shown(served, "/searches"), shown(served, "/searches?page=2")
    assert (len(first), len(second)) == (25, OF_ADA + 1 - 25)
    assert not set(first) & set(second)
    assert shown(served, "/searches?page=99") == second


@pytest.mark.parametrize(
    "query", ["state=unknown", "by=nobody", "by=%00", "page=0", "page=-1", "page=x", "state=&by="]
)
def test_an_address_that_is_wrong_shows_all_searches(served, query):
    assert shown(served, f"/searches?{query}") == shown(served, "/searches")


def test_a_part_says_the_address_of_its_page_unless_it_was_only_refreshed(served):
    part = "/parts/searches?state=queued&by=ada&page=2"
    answer = served.get(part, headers=PAGE)
    assert answer.headers["hx-replace-url"] == "/searches?state=queued&by=ada&page=2"
    refreshed = served.get(part, headers={**PAGE, "HX-Trigger": "searches"})
    assert "hx-replace-url" not in refreshed.headers


def test_home_leads_to_all_searches(served):
    assert '<a href="/searches">All searches</a>' in served.get("/", headers=PAGE).text


def test_who_did_what_is_shown_the_newest_first(served):
    assert shown(served, "/actions")[:3] == ["bob", "bob", "ada"]
    assert shown(served, "/actions?who=bob") == ["bob", "bob"]
    assert len(shown(served, "/actions?page=2")) == OF_ADA + 2 - 25


def test_an_action_leads_to_its_search_and_a_study_of_digits_to_none(served):
    text = served.get("/actions?who=bob", headers=PAGE).text
    assert re.findall(r'href="/searches/(\d+)"', text) == [str(OF_ADA + 1)]


def test_a_program_asks_for_those_of_a_person(served):
    found = served.get("/api/v1/searches", params={"by": "bob"}, headers=BEARER).json()
    assert [search["study"] for search in found["searches"]] == ["of-bob"]
    found = served.get("/api/v1/actions", params={"who": "bob"}, headers=BEARER).json()
    assert (found["total"], {action["who"] for action in found["actions"]}) == (2, {"bob"})
    for path, name in (("searches", "by"), ("actions", "who")):
        answer = served.get(f"/api/v1/{path}", params={name: "\0"}, headers=BEARER)
        assert answer.status_code in (200, 422)
