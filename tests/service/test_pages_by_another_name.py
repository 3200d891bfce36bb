"""Every page with a form, over plain http, in a real browser that knows the server by another name.

Only of `localhost` and 127.0.0.1 do browsers say where a request comes from (Sec-Fetch-Site); by
any other name without TLS, the Origin header is all that tells our own pages from others.
"""

import shutil
import socket

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
NAME, OTHER_NAME = "gpu-box", "evil.example"
READING_FORMS = {
    "/": "#study-filter",
    "/compare": "form.filters",
    "/studies/quick": "form.filters >> nth=0",
    "/studies/quick#trials": "#trial-filter",
}
"""The forms that send nothing but a GET, with the page of each."""


@pytest.fixture(scope="module")
def browser():
    arguments = ["--no-sandbox", f"--host-resolver-rules=MAP {NAME} 127.0.0.1"]
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a server by its other name."""
    storage = f"sqlite:///{tmp_path_factory.mktemp('named')}/autotune.db"
    for name in ("quick", "second", "third"):
        write_example(storage, name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hosts = (f"{NAME}:{port}",)
    with listening_service(storage, search_module=STAND_IN, port=port, allowed_hosts=hosts):
        yield f"http://{NAME}:{port}"


@pytest.fixture
def stranger(browser):
    """A page without a token; `refused` are the requests that were answered with 403."""
    context = browser.new_context()
    page = context.new_page()
    page.refused = []
    page.on(
        "response",
        lambda answer: page.refused.append(answer.url) if answer.status == 403 else None,
    )
    yield page
    context.close()


@pytest.fixture
def page(stranger, server):
    """A page that has signed in by the form, which led to the page that was asked for."""
    stranger.goto(f"{server}/compare")
    stranger.get_by_label("Token").fill(TOKEN)
    stranger.get_by_role("button", name="Sign in").click()
    stranger.wait_for_url(f"{server}/compare")
    stranger.wait_for_selector("nav")
    yield stranger
    assert stranger.refused == []


def send_form(form):
    """Sends it a moment later: what is evaluated must end before its page does."""
    form.evaluate("form => void setTimeout(() => form.requestSubmit())")


def test_a_wrong_token_is_said_to_be_wrong(stranger, server):
    stranger.goto(f"{server}/")
    stranger.get_by_label("Token").fill("wrong")
    stranger.get_by_role("button", name="Sign in").click()
    assert "wrong" in stranger.get_by_role("main").inner_text()


def test_the_url_with_the_token_signs_in(stranger, server):
    stranger.goto(f"{server}/?token={TOKEN}")
    assert stranger.url == f"{server}/"
    assert stranger.evaluate("document.referrer") == ""


def test_a_new_search_is_put_into_the_queue(page, server):
    page.goto(f"{server}/new")
    page.locator("#f-name").fill("of-the-form")
    page.get_by_role("button", name="Start the search").click()
    playwright.expect(page.locator("h1")).to_have_text("of-the-form")


@pytest.mark.parametrize("path", READING_FORMS)
def test_a_form_that_only_reads_is_answered(page, server, path):
    page.goto(f"{server}{path}")
    with page.expect_response(lambda answer: answer.request.method == "GET") as answered:
        page.locator(READING_FORMS[path]).evaluate(
            "form => void setTimeout(() => form.requestSubmit())"
        )
    assert answered.value.status in (200, 303)


def test_the_dialogs_change_what_they_say(page, server):
    page.goto(f"{server}/studies/second")
    page.get_by_text("Manage").click()
    page.get_by_role("button", name="Rename…").click()
    page.get_by_label("New name").fill("renamed")
    page.locator("#dialog-go").click()
    page.wait_for_url(f"{server}/studies/renamed")


@pytest.mark.parametrize("policy", ["no-referrer", "same-origin", "unsafe-url"])
@pytest.mark.parametrize("path", ["/sign-in", "/new", "/api/v1/searches"])
def test_a_form_of_another_site_is_refused(page, server, path, policy):
    form = (
        f'<meta name="referrer" content="{policy}">'
        f'<form method="post" action="{server}{path}"><input name="token" value="{TOKEN}"></form>'
    )
    page.route(
        f"http://{OTHER_NAME}/", lambda route: route.fulfill(body=form, content_type="text/html")
    )
    page.goto(f"http://{OTHER_NAME}/")
    with page.expect_response(f"{server}{path}") as answered:
        send_form(page.locator("form"))
    assert answered.value.status == 403
    page.refused.clear()
