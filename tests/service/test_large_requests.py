"""What a stranger sends is kept only in small amounts, however much it is and wherever it is."""

import json
import socket
from contextlib import ExitStack
from types import SimpleNamespace

import psutil
import pytest

from autotune.service.connections import (
    LARGEST_HEAD_BYTES,
    MOST_HEADERS,
    MOST_PIPELINED,
    MOST_STRANGERS,
)
from autotune.service.submissions import ACCEPTED
from tests.building.listening_service import listening_service
from tests.building.queued_searches import TOKEN
from tests.building.service import STAND_IN

MIB = 2**20
SENT_BYTES = 64 * MIB
LINE = b"GET /api/v1/health HTTP/1.1\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    storage = f"sqlite:///{tmp_path_factory.mktemp('large')}/autotune.db"
    with listening_service(storage, search_module=STAND_IN) as url:
        port = int(url.rpartition(":")[2])
        yield SimpleNamespace(port=port, host=f"Host: 127.0.0.1:{port}\r\n".encode())


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def answer_to(server, *parts):
    """Returns what the server answers until it closes the connection."""
    received = b""
    with connect(server) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            while part := connection.recv(65536):
                received += part
        except (ConnectionResetError, BrokenPipeError):
            pass
    return received


def is_closed(connection):
    connection.settimeout(0.2)
    try:
        return connection.recv(1) == b""
    except TimeoutError:  # nothing happens
        return False
    except ConnectionResetError:
        return True


def headers(number, size):
    return b"".join(b"x-%d: %s\r\n" % (each, b"a" * size) for each in range(number))


def many_headers(server):
    return LINE + server.host, headers(64, 1000)


def one_header(server):
    return LINE + server.host + b"x: ", b"a" * 64_000


def name_of_a_header(server):
    return LINE + server.host, b"a" * 64_000


def address(server):
    return b"GET /", b"a" * 64_000


def lines_after_the_body(server):
    begin = b"POST /sign-in HTTP/1.1\r\n" + server.host
    return begin + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n", headers(64, 1000)


def words_of_a_chunk(server):
    begin = b"POST /sign-in HTTP/1.1\r\n" + server.host
    return begin + b"Transfer-Encoding: chunked\r\n\r\n1;", b"a" * 64_000


def body_of_the_form(server):
    begin = b"POST /sign-in HTTP/1.1\r\n" + server.host
    return begin + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b"a" * 65536 + b"\r\n"


@pytest.mark.parametrize(
    "way",
    [
        many_headers,
        one_header,
        name_of_a_header,
        address,
        lines_after_the_body,
        words_of_a_chunk,
        body_of_the_form,
    ],
)
def test_what_a_stranger_sends_is_not_kept(server, way):
    begin, again = way(server)
    before_bytes = psutil.Process().memory_info().rss
    largest_bytes = before_bytes
    with connect(server) as connection:
        connection.sendall(begin)
        try:
            for _ in range(SENT_BYTES // len(again)):
                connection.sendall(again)
                largest_bytes = max(largest_bytes, psutil.Process().memory_info().rss)
        except (ConnectionResetError, BrokenPipeError):
            pass  # at the latest after the time that a body may take
    assert largest_bytes - before_bytes < 16 * MIB


def test_headers_up_to_the_limits_are_answered(server):
    large = headers(MOST_HEADERS - 2, (LARGEST_HEAD_BYTES - 4096) // MOST_HEADERS)
    answer = answer_to(server, LINE + server.host + large + b"Connection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(("number", "size"), [(MOST_HEADERS, 1), (10, LARGEST_HEAD_BYTES // 8)])
def test_headers_beyond_the_limits_are_answered_with_431(server, number, size):
    answer = answer_to(server, LINE + server.host + headers(number, size) + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ") or answer == b""  # cut off while it was sending


def test_what_follows_a_body_is_no_header(server):
    """A token there would be one that nothing in front of the server has seen."""
    request = b"GET /api/v1/studies HTTP/1.1\r\n" + server.host + b"Connection: close\r\n"
    request += b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"
    request += f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()
    assert answer_to(server, request).startswith(b"HTTP/1.1 401 ")


def test_a_body_of_many_pieces_is_read_whole(server):
    answer = answer_to_submission(server, dataset="a" * 500_000)
    assert b"500000 characters" in answer


def test_no_answer_repeats_a_long_value_whole(server):
    for name in ACCEPTED:
        answer = answer_to_submission(server, **{name: "a" * 100_000})
        assert len(answer) < 2000, name


def answer_to_submission(server, **settings):
    begin = b"POST /api/v1/searches HTTP/1.1\r\n" + server.host + b"Connection: close\r\n"
    begin += f"Content-Type: application/json\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
    body = json.dumps(settings).encode()
    answer = answer_to(server, begin + b"Content-Length: %d\r\n\r\n" % len(body), body)
    assert answer.startswith(b"HTTP/1.1 422 ")
    return answer


@pytest.mark.parametrize(("number", "is_answered"), [(MOST_PIPELINED, True), (5000, False)])
def test_only_some_requests_wait_for_the_answer_to_another(server, number, is_answered):
    last = LINE + server.host + b"Connection: close\r\n\r\n"
    answer = answer_to(server, (LINE + server.host + b"\r\n") * number + last)
    assert (answer.count(b"HTTP/1.1 200 ") == number + 1) == is_answered
    assert answer.count(b"HTTP/1.1 200 ") <= number + 1


def test_of_too_many_strangers_the_one_who_came_first_is_cut_off(server):
    known = b"GET /api/v1/events HTTP/1.1\r\n" + server.host
    known += f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()
    with ExitStack() as opened:
        stream = opened.enter_context(connect(server))
        stream.sendall(known)
        assert stream.recv(65536).startswith(b"HTTP/1.1 200 ")
        strangers = [opened.enter_context(connect(server)) for _ in range(MOST_STRANGERS)]
        for stranger in strangers:
            stranger.sendall(LINE)
        last = opened.enter_context(connect(server))
        last.sendall(LINE + server.host + b"\r\n")
        assert last.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert is_closed(strangers[0])
        strangers[-1].sendall(server.host + b"\r\n")
        assert strangers[-1].recv(65536).startswith(b"HTTP/1.1 200 ")
        assert not is_closed(stream)
