"""Behind a proxy that serves it under a path, every address leads below that path."""

import re

import pytest

from autotune.storage.searches import NewSearch
from tests.building.service import BEARER, ORIGIN, TOKEN, cookie_of, serving, write_example

ROOT = "/tune"
ADDRESSES = re.compile(r'\b(?:href|src|action|hx-get|hx-post|data-[a-z-]+)="(/[^"]*)"')
PAGES = (
    *("/", "/searches", "/actions", "/new", "/fit", "/compare", "/sign-in"),
    *("/searches/1?log=1", "/studies/quick"),
)


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    url = f"sqlite:///{tmp_path_factory.mktemp('path')}/autotune.db"
    for name in ("quick", "other"):
        write_example(url, name)
    return url


@pytest.fixture(scope="module")
def served(storage):
    with serving(storage, root_path=ROOT) as client:
        new = NewSearch(request={}, submitted_by="ada", group="nowhere")
        client.app.state.service.searches.submit(new)
        yield client


def addresses_in(answer):
    return {address.replace("&amp;", "&") for address in ADDRESSES.findall(answer.text)}


@pytest.mark.parametrize("page", PAGES)
def test_every_address_of_a_page_leads_below_the_path(served, page):
    found = addresses_in(served.get(f"{ROOT}{page}", headers={**BEARER, "Accept": "text/html"}))
    assert [address for address in found if not address.startswith(f"{ROOT}/")] == []


@pytest.mark.slow
def test_every_address_of_every_page_leads_below_the_path_and_is_answered(served):
    to_ask, asked = {f"{ROOT}{page}" for page in PAGES}, set()
    while to_ask:
        address = to_ask.pop()
        asked.add(address)
        answer = served.get(address, headers={**BEARER, "Accept": "text/html"})
        # Some take a POST; a figure may be of what was not measured.
        assert answer.status_code in (200, 303, 405, 422), (address, answer.status_code)
        is_page = answer.headers.get("content-type", "").startswith("text/html")
        if is_page and "/report" not in address:
            for found in addresses_in(answer):
                assert found.startswith(f"{ROOT}/"), (address, found)
                to_ask |= {found.partition("#")[0]} - asked
    assert {f"{ROOT}/studies/other", f"{ROOT}/api/v1/studies/quick/report"} <= asked
    assert len(asked) > 50


def test_a_page_of_an_error_leads_home_below_the_path(served):
    for address in ("/tune/nothing", "/tune/studies/quik"):
        answer = served.get(address, headers={**BEARER, "Accept": "text/html"})
        found = addresses_in(answer)
        assert f"{ROOT}/" in found
        assert [address for address in found if not address.startswith(f"{ROOT}/")] == []


@pytest.mark.parametrize("path", ["/tune/studies/quick", "/studies/quick"])
def test_the_proxy_may_remove_the_path_or_leave_it(served, path):
    assert served.get(path, headers=BEARER).status_code == 200
    assert served.get(ROOT, headers=BEARER).status_code == 200


def test_signing_in_leads_below_the_path_and_sets_the_cookie_for_it(served):
    form = served.get(f"{ROOT}/studies/quick", headers={"Accept": "text/html"})
    assert f'action="{ROOT}/sign-in"' in form.text
    data = {"token": TOKEN, "next": "/studies/quick"}
    answers = (
        served.post(f"{ROOT}/sign-in", data=data, headers={"Origin": ORIGIN}),
        served.get(f"{ROOT}/studies/quick?token={TOKEN}"),
    )
    for answer in answers:
        assert answer.headers["location"] == f"{ROOT}/studies/quick"
        assert f"Path={ROOT};" in answer.headers["set-cookie"]
    served.cookies.clear()


def test_signing_out_leads_below_the_path_and_removes_the_cookie_of_it(served):
    answer = served.post(f"{ROOT}/sign-out", headers={"Origin": ORIGIN})
    assert answer.headers["location"] == f"{ROOT}/sign-in"
    assert f"Path={ROOT};" in answer.headers["set-cookie"]


def test_redirects_and_the_address_that_a_part_gives_are_below_the_path(served):
    redirect = served.get(f"{ROOT}/studies/quick?increase=2", headers=BEARER)
    assert redirect.headers["location"].startswith(f"{ROOT}/studies/quick?")
    part = served.get(f"{ROOT}/studies/quick/parts/trials", headers=BEARER)
    assert part.headers["hx-replace-url"].startswith(f"{ROOT}/studies/quick")
    body = {"max_mem": "8GiB", "group": ""}
    new = served.post(f"{ROOT}/api/v1/searches", json=body, headers=BEARER)
    assert new.headers["location"].startswith(f"{ROOT}/api/v1/searches/")


def test_the_description_of_the_interface_says_where_it_is(served):
    document = served.get(f"{ROOT}/api/v1/openapi.json", headers=BEARER).json()
    assert document["servers"] == [{"url": ROOT}]


def test_servers_of_one_database_share_a_cookie_and_others_do_not(storage, tmp_path, served):
    with (
        serving(storage, port=8322) as second,
        serving(f"sqlite:///{tmp_path}/a.db", port=8323) as other,
    ):
        assert cookie_of(second) == cookie_of(served) != cookie_of(other)
        sign_in = {
            "data": {"token": TOKEN},
            "headers": {"Host": "127.0.0.1:8322", "Origin": "http://127.0.0.1:8322"},
        }
        signed_in = second.post("/sign-in", **sign_in).headers["set-cookie"].partition(";")[0]
        answer = served.get(f"{ROOT}/api/v1/studies", headers={"Cookie": signed_in})
        assert answer.status_code == 200
