"""A server whose answers do not end does not fill the memory of its client."""

import contextlib
import gzip
import itertools
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

import autotune
from autotune.client import connection
from autotune.client.events import events_of, lines_of
from autotune.errors import InvalidInput

BOMB = gzip.compress(bytes(2**24))


class Bombs(BaseHTTPRequestHandler):
    """Answers everything with 16 KiB that become 16 MiB."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(BOMB)

    def log_message(self, *_):
        pass


class Verbose(BaseHTTPRequestHandler):
    """Says with too many bytes which version it has, and that it knows nothing."""

    def do_GET(self):
        self.send_response(200 if self.path.endswith("/health") else 404)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(b'{"version": "0.0"}' + b" " * 2**22)

    def log_message(self, *_):
        pass


class Informative(BaseHTTPRequestHandler):
    """Says again and again that the client may continue."""

    def do_GET(self):
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)
                time.sleep(0.01)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served(handler):
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def url():
    with served(Bombs) as at:
        yield at


@pytest.fixture
def verbose_url():
    with served(Verbose) as at:
        yield at


def test_an_answer_that_does_not_end_is_one_sentence(url, monkeypatch):
    monkeypatch.setattr(connection, "_LARGEST_ANSWER_BYTES", 2**20)
    with autotune.Client(url, "token") as client:
        with pytest.raises(InvalidInput, match="does not end") as raised:
            client.studies()
        assert "URL of an autotune server" in raised.value.hint


def test_a_version_that_takes_too_many_bytes_is_left_out(verbose_url):
    here = connection.Connection(verbose_url, token=None, version="1")
    with pytest.raises(InvalidInput, match="is not a server of autotune"):
        here.json("GET", "/studies")


def test_a_rejection_of_the_event_stream_with_too_many_bytes_is_one_sentence(verbose_url):
    here = connection.Connection(verbose_url, token=None, version="1")
    with pytest.raises(InvalidInput, match="does not end"):
        next(iter(events_of(here, parameters={}, after=None)))


@pytest.mark.parametrize(
    "piece", [b"x" * 2**16, b"data: x\n" * 2**12], ids=["one line", "one event of many lines"]
)
def test_an_event_that_does_not_end_is_one_sentence(piece):
    with pytest.raises(InvalidInput, match="an event that does not end"):
        list(lines_of(itertools.repeat(piece, 10_000)))


def test_lines_are_the_same_however_they_arrive():
    text = "id: 1\nevent: search\ndata: {}\r\n\n: ping\n\ndata: über"
    whole = list(lines_of([text.encode()]))
    assert whole == ["id: 1", "event: search", "data: {}", "", ": ping", ""]
    assert list(lines_of(bytes([byte]) for byte in text.encode())) == whole


def test_an_answer_whose_head_does_not_end_is_one_sentence(monkeypatch):
    monkeypatch.setattr(connection, "_LONGEST_ANSWER_SECONDS", 1.0)
    with served(Informative) as url, pytest.raises(InvalidInput, match="has not ended after 1 s"):
        autotune.Client(url).studies()
