"""Nobody is told the URL of the server's database: neither who has a token, nor a stranger."""

import sqlite3
from contextlib import closing

import pytest

from autotune.storage.hidden_url import HiddenUrl
from tests.building.service import BEARER, routes_of, serving, write_example

SECRET = "a-folder-that-nobody-is-told-of"
PAGE = {"Accept": "text/html", "Sec-Fetch-Mode": "navigate"}
NOT_ASKED = ("/api/v1/events", "/api/v1/dry-run", "/api/v1/predict", "/api/v1/fit", "/new/plan")
"""A stream without an end, and what starts a process that imports torch."""
VALUES = {
    "name": ("quick", "quik"),
    "study": ("quick", "quik"),
    "number": ("0", "99"),
    "kind": ("pareto", "unknown"),
    "target": ("pytorch", "unknown"),
    "path": ("page.css", "unknown"),
    "version": ("0",),
    "file": ("profile.json",),
}


@pytest.fixture
def file(tmp_path):
    return tmp_path / SECRET / "autotune.db"


@pytest.fixture
def client(file):
    file.parent.mkdir()
    write_example(f"sqlite:///{file}")
    with serving(f"sqlite:///{file}") as opened:
        yield opened


def requests_of(client):
    """Yields (method, path) of each route, with values that exist and with some that do not."""
    for method, template in routes_of(client.app):
        if method in ("HEAD", "OPTIONS") or template in NOT_ASKED:
            continue
        for choice in (0, -1):
            path = template
            for name, values in VALUES.items():
                for writing in (f"{{{name}}}", f"{{{name}:path}}"):
                    path = path.replace(writing, values[choice])
            yield method, path


def rename_tables(file):
    with closing(sqlite3.connect(file)) as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for (name,) in names:
            if not name.startswith("sqlite_"):
                connection.execute(f"ALTER TABLE {name} RENAME TO no_{name}")
        connection.commit()


def assert_not_told(answer, what):
    assert SECRET not in answer.text, (what, answer.status_code, answer.text[:500])
    assert SECRET not in str(answer.headers), what


@pytest.mark.parametrize("path", ["/api/v1/studies/{}", "/studies/{}", "/api/v1/compare?study={}"])
def test_who_asks_for_a_study_is_not_told_it(client, path):
    for name in ("quick", "quik"):
        assert_not_told(client.get(path.format(name), headers=BEARER), path)
    conflict = client.patch("/api/v1/studies/quick", json={"name": "quick"}, headers=BEARER)
    assert_not_told(conflict, "a name that is taken")


@pytest.mark.slow
def test_no_route_tells_it(client):
    asked = 0
    for method, path in requests_of(client):
        if method == "DELETE" and path.endswith("quick"):
            continue
        for headers in ({}, {**BEARER, **PAGE} if path.startswith("/studies") else BEARER):
            body = {"json": {"name": "third"}} if method in ("POST", "PATCH", "PUT") else {}
            assert_not_told(client.request(method, path, headers=headers, **body), (method, path))
            asked += 1
    assert asked > 100


def test_a_study_is_found_at_the_address_of_the_server(client):
    shown = client.get("/api/v1/studies/quick", headers=BEARER).json()
    assert shown["storage"] == "http://127.0.0.1:8321"
    report = client.get("/api/v1/studies/quick/report", headers=BEARER).text
    assert "--server http://127.0.0.1:8321" in report


@pytest.mark.slow
def test_where_the_database_cannot_be_used_nobody_is_told_which_it_is(client, file):
    rename_tables(file)
    refused = 0
    for method, path in requests_of(client):
        for headers in ({"Authorization": "Bearer wrong"}, BEARER):
            answer = client.request(method, path, headers=headers)
            assert_not_told(answer, (method, path))
            if answer.status_code == 503 and answer.headers["content-type"].endswith(
                "problem+json"
            ):
                assert answer.json()["detail"].startswith("the database of the server cannot be")
                refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    ("url", "text"),
    [
        (
            "sqlite:///a b/s.db",
            "in sqlite:///a b/s.db: autotune show --storage 'sqlite:///a b/s.db'",
        ),
        (
            "postgresql+psycopg://me:pass%40word@secret-box/db",
            "postgresql+psycopg://me:***@secret-box/db",
        ),
        (
            "postgresql+psycopg://me@secret-box/db",
            'connection to server at "secret-box" (10.0.0.5), port 5432 failed: no',
        ),
        ("sqlite:///a b/s.db", "the file a b/s.db is not there"),
    ],
)
def test_no_writing_of_a_url_is_left_in_a_text(url, text):
    found = HiddenUrl(url).without_in({"message": [text]})["message"][0]
    for secret in ("a b/s.db", "secret-box", "10.0.0.5", "me", "pass"):
        assert secret not in found.replace("message", "")


def test_its_server_is_not_named_twice():
    url = "postgresql+psycopg://me@box/db"
    text = HiddenUrl(url).without(f"the server of {url} cannot be reached")
    assert text == "the database of the server cannot be reached"


def test_a_stranger_is_not_told_it_where_the_database_cannot_be_used(client, file):
    rename_tables(file)
    answer = client.get("/api/v1/studies", headers={"Authorization": "Bearer wrong"})
    assert answer.status_code == 503
    assert_not_told(answer, "a stranger")
