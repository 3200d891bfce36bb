"""Requests that no browser sends get an answer of their own and never an error of the server."""

import socket

import pytest

from autotune.service.application import create_app
from autotune.service.settings import ServerSettings
from tests.building.listening_service import listening_service
from tests.building.service import BEARER, STAND_IN, TOKEN, routes_of, write_example

PATHS = sorted(
    {path for _, path in routes_of(create_app(ServerSettings(token=TOKEN))) if "{" not in path}
    - {"/sign-in", "/api/v1/events"}
)
METHODS = ("HEAD", "OPTIONS", "PUT", "TRACE", "BREW", "PROPFIND")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_a_route_does_not_take_is_said_to_be_so(anonymous, method, path):
    answer = anonymous.request(method, path, headers=BEARER)
    assert answer.status_code == 405
    assert answer.headers["allow"]
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/nothing",
        "/api/v1/studies/",
        "/api/v1//studies",
        "/api/v2/studies",
        "/docs",
        "/redoc",
        "/openapi.json",
        "/static/",
        "/static/../../pyproject.toml",
        "/static/v/..%2f..%2fgate.py",
        "/%00",
        "/%ff",
        "/" + "a" * 5000,
    ],
)
def test_an_address_that_there_is_not_is_not_found(get, path):
    answer = get(path)
    assert answer.status_code == 404
    assert answer.json()["detail"]


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (b"{", "application/json"),
        (b"\xff\xfe", "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"max_mem": NaN}', "application/json"),
        (b'{"trials": 1e400}', "application/json"),
        (b'{"trials": ' + b"9" * 5000 + b"}", "application/json"),
        (b'{"name": "\\ud800"}', "application/json"),
        (b'{"name": "a\\u0000"}', "application/json"),
        (b"null", "application/json"),
        (b"", "application/json"),
        (b"name=1", "application/x-www-form-urlencoded"),
        (b"--x", "multipart/form-data; boundary=x"),
        (b"<a/>", "text/xml"),
    ],
)
def test_a_body_that_is_no_submission_is_refused(anonymous, content, content_type):
    headers = {**BEARER, "Content-Type": content_type}
    answer = anonymous.post("/api/v1/searches", content=content, headers=headers)
    assert answer.status_code in (400, 415, 422), answer.text
    assert answer.json()["detail"]


# -- a real server, which reads bytes --------------------------------------------------------------


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    storage = f"sqlite:///{tmp_path_factory.mktemp('odd')}/autotune.db"
    write_example(storage)
    with listening_service(storage, search_module=STAND_IN) as url:
        yield int(url.rpartition(":")[2])


def status_of(port, request):
    """Sends bytes, of which PORT is the server's port, and returns the status of the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(request.replace(b"PORT", str(port).encode()))
        answer = connection.recv(65536)
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /api/v1/health HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\n\r\n", 200),
        (b"GET /api/v1/health HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
        (b"GET /api/v1/health HTTP/1.0\r\n\r\n", 421),
        (b"GET http://evil.example/api/v1/health HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
        (b"GET /%zz%0d%0aX:%20y?%zz HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\n\r\n", 401),
        (b"GET /?token=%ff%00 HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\n\r\n", 401),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\nCookie: \xff;;=;autotune_token\r\n\r\n", 401),
        (b"OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\n\r\n", 401),
        (b"POST /sign-in HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\nContent-Length: 9999999\r\n\r\n", 413),
    ],
)
def test_odd_bytes_get_the_answer_that_they_deserve(port, request_bytes, status):
    assert status_of(port, request_bytes) == status


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\nHost: evil.example\r\n\r\n",
        b"POST /sign-in HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\nContent-Length: -1\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)
def test_bytes_that_are_no_request_are_refused(port, request_bytes):
    assert 400 <= status_of(port, request_bytes) < 500


def test_a_client_that_sends_half_a_body_and_leaves_disturbs_nobody(port):
    head = b"POST /sign-in HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\nContent-Length: 100\r\n\r\ntoken="
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(head.replace(b"PORT", str(port).encode()))
    healthy = b"GET /api/v1/health HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\n\r\n"
    assert status_of(port, healthy) == 200
