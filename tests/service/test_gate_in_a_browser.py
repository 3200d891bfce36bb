"""Signing in and the report's sandbox in a real browser."""

import shutil
from urllib.parse import quote

import pytest

from tests.building.listening_service import listening_service
from tests.building.queued_searches import TOKEN
from tests.building.service import STAND_IN, write_example

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    storage = f"sqlite:///{tmp_path_factory.mktemp('gate')}/autotune.db"
    write_example(storage)
    with listening_service(storage, search_module=STAND_IN) as url:
        yield url


@pytest.fixture
def context(browser):
    opened = browser.new_context()
    yield opened
    opened.close()


@pytest.fixture
def page(context, server):
    """A page that is signed in; its `problems` are what its console complains of."""
    opened = context.new_page()
    opened.problems = []
    opened.on("pageerror", lambda error: opened.problems.append(str(error)))
    opened.on(
        "console",
        lambda said: opened.problems.append(said.text) if said.type == "error" else None,
    )
    opened.goto(f"{server}/?token={TOKEN}")
    return opened


def test_the_printed_url_opens_the_page_and_leaves_no_token_behind(page, server):
    assert page.url == f"{server}/"
    assert TOKEN not in page.content()
    assert page.evaluate("document.cookie") == ""
    assert page.evaluate("document.referrer") == ""


def test_the_form_signs_in_and_leads_to_the_page_that_was_asked_for(context, server):
    page = context.new_page()
    page.goto(f"{server}/studies/quick")
    page.get_by_label("Token").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    assert "wrong" in page.get_by_role("main").inner_text()
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_function("document.title.includes('quick')")
    assert page.url == f"{server}/studies/quick"


def test_a_link_on_another_site_opens_the_page(page, server):
    """The browser leaves the cookie out of the first request, as it is SameSite=Strict."""
    link = f'<a href="{server}/studies/quick">look</a>'
    page.goto(f"data:text/html,{quote(link)}")
    page.get_by_text("look").click()
    page.wait_for_function("document.title.includes('quick')")
    assert page.url == f"{server}/studies/quick"


def test_another_site_can_neither_read_nor_write(page, server):
    page.goto("data:text/html,<p>another site</p>")
    for options in ("{}", "{method: 'POST', mode: 'no-cors', credentials: 'include'}"):
        answer = page.evaluate(
            f"fetch('{server}/api/v1/studies', {options})"
            ".then(got => got.text()).then(text => text || 'nothing', error => 'nothing')"
        )
        assert answer == "nothing"


def test_a_page_of_another_port_of_this_host_writes_nothing(page, server):
    """It is of the same site, so that the browser sends it the cookie."""
    other = "http://127.0.0.1:8999/"
    form = (
        f'<form method="post" enctype="text/plain" action="{server}/api/v1/searches">'
        "<button>go</button></form>"
    )
    page.route(other, lambda route: route.fulfill(body=form, content_type="text/html"))
    page.goto(other)
    with page.expect_navigation() as answered:
        page.get_by_role("button", name="go").click()
    assert answered.value.status == 403


def test_the_report_draws_its_figures_in_its_sandbox(page, server):
    page.problems.clear()
    page.goto(f"{server}/api/v1/studies/quick/report")
    page.wait_for_selector(".main-svg, canvas", timeout=20_000)
    assert page.evaluate("window.origin") == "null"
    assert page.problems == []


def test_the_report_reaches_nothing_of_the_server(page, server):
    page.goto(f"{server}/api/v1/studies/quick/report")
    reached = page.evaluate(
        f"fetch('{server}/api/v1/studies', {{credentials: 'include'}})"
        ".then(() => 'reached', () => 'nothing')"
    )
    assert reached == "nothing"
