"""Two `autotune serve` on one PostgreSQL behind nginx, in a browser, with and without a path.

Nothing stands in for anything: nginx has the lines of the documentation, each server has a folder
and a random token of its own, and the search trains.
"""

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import pytest

from tests.building import nginx
from tests.building.queued_searches import wait_until
from tests.service.test_a_real_search import SMALL

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium"),
    pytest.mark.skipif(nginx.NGINX is None, reason=nginx.MISSING),
    pytest.mark.slow,
]
playwright.expect.set_options(timeout=120_000)
OFTEN = range(4)
"""As often as it takes to come to both servers several times."""


@contextmanager
def autotune_serve(folder, storage, *options):
    """Runs a server in a folder of its own; yields the URL that it prints, with its token."""
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "AUTOTUNE_TOKEN"}
    command = [sys.executable, "-m", "autotune", "serve", "--port", "0", "--storage", storage]
    with subprocess.Popen(
        [*command, *options],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=(folder / "stderr").open("w"),
        text=True,
    ) as running:
        try:
            yield running.stdout.readline().strip()
        finally:
            running.terminate()


class Balanced:
    """Two servers behind one address."""

    def __init__(self, url, servers):
        self.url = url
        self.servers = servers
        """The URLs that the servers have printed, the first one's first."""

    @property
    def token(self):
        """The random token of the first."""
        return parse_qs(urlsplit(self.servers[0]).query)["token"][0]

    def get(self, path):
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.get(f"{self.url}{path}", headers=headers, timeout=60)


@pytest.fixture(params=["", "/tune"], ids=["at the root", "under a path"])
def balanced(request, postgres_url, tmp_path):
    port, root = nginx.free_port(), request.param
    options = ["--allow-host", f"127.0.0.1:{port}", *(["--root-path", root] if root else [])]
    with ExitStack() as opened:
        servers = [
            opened.enter_context(autotune_serve(tmp_path / name, postgres_url, *options))
            for name in ("one", "two")
        ]
        ports = [urlsplit(server).port for server in servers]
        lines = nginx.documented("Several servers", port=port, servers=ports)
        lines = lines.replace("location / {", f"location {root}/ {{")
        opened.enter_context(nginx.nginx(tmp_path / "nginx", lines, port=port))
        yield Balanced(f"http://127.0.0.1:{port}{root}", servers)


@pytest.fixture
def page(balanced):
    """A page of a browser; `answers` are what it was sent, as (status, URL)."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_page()
        opened.set_default_timeout(120_000)
        opened.answers, opened.complaints = [], []
        opened.on("response", lambda answer: opened.answers.append((answer.status, answer.url)))
        opened.on("pageerror", lambda error: opened.complaints.append(str(error)))
        yield opened
        browser.close()


def test_a_person_signs_in_submits_watches_and_reads_whichever_server_answers(balanced, page):
    page.goto(f"{balanced.url}/")
    page.get_by_label("Token").fill(balanced.token)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_selector("nav")
    page.answers.clear()
    for _ in OFTEN:
        page.goto(f"{balanced.url}/")
        playwright.expect(page.locator("#stream")).to_have_text("Live")
    page.get_by_role("link", name="New search", exact=True).first.click()
    page.wait_for_selector("#new-search")
    settings = urlencode({**SMALL, "trials": 2, "name": "balanced", "confirm": "true"})
    page.goto(f"{balanced.url}/new?{settings}")
    page.get_by_role("button", name="Start the search").click()
    # The events of the search lead to its study, and say how it goes, without loading a page.
    page.wait_for_url(f"{balanced.url}/studies/balanced")
    playwright.expect(page.locator("#state")).to_contain_text("finished")
    playwright.expect(page.locator("#trial-table tbody tr")).to_have_count(2)
    page.get_by_role("link", name="Log of the search").click()
    for _ in OFTEN:
        playwright.expect(page.locator("pre.log")).to_contain_text("balanced")
        page.reload()
    page.goto(f"{balanced.url}/studies/balanced/trials/0")
    for _ in OFTEN:
        assert page.locator("#log pre").count() == 1
        page.reload()
    page.goto(f"{balanced.url}/studies/balanced")
    page.get_by_role("link", name="Report", exact=True).click()
    page.wait_for_url(f"{balanced.url}/api/v1/studies/balanced/report")
    assert "balanced" in page.title()
    page.goto(f"{balanced.url}/studies/balanced")
    page.get_by_text("Manage").click()
    page.get_by_role("button", name="Rename…").click()
    page.get_by_label("New name").fill("renamed")
    page.locator("#dialog-go").click()
    page.wait_for_url(f"{balanced.url}/studies/renamed")

    def has_its_log_everywhere():
        answers = [balanced.get("/api/v1/studies/renamed/trials/0/log") for _ in OFTEN]
        return all(answer.status_code == 200 for answer in answers)

    wait_until(has_its_log_everywhere)
    assert [answer for answer in page.answers if answer[0] >= 400] == []
    assert page.complaints == []
    assert {url for _, url in page.answers if not url.startswith(f"{balanced.url}/")} == set()


def test_the_commands_of_a_client_work_through_the_proxy(balanced, tmp_path):
    environment = {
        **os.environ,
        "AUTOTUNE_SERVER": balanced.url,
        "AUTOTUNE_TOKEN": balanced.token,
    }

    def autotune(*arguments):
        command = [sys.executable, "-m", "autotune", *arguments]
        ended = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    small = "--max-mem 64MiB --layers 2 --width 16 --heads 2 --seq-len 16 --global-batch 4"
    space = tmp_path / "small.toml"
    space.write_text(SMALL["space_content"])
    autotune(
        *("submit", *small.split(), "--eval-sequences", "2", "--space", str(space)),
        *("--trials", "2", "--no-confirm", "--name", "mine"),
    )
    assert "mine" in autotune("watch", "1")
    assert "mine" in autotune("queue")
    for _ in OFTEN:
        assert "mine" in autotune("show", "mine", "--server", balanced.url)
    for _ in OFTEN:
        assert balanced.get("/api/v1/searches/1/log").text
    token = balanced.servers[1].partition("token=")[2]
    answers = [
        httpx.get(f"{balanced.url}/api/v1/actions", headers={"Authorization": f"Bearer {token}"})
        for _ in OFTEN
    ]
    assert {answer.status_code for answer in answers} == {200}
