"""Clients that send slowly, never read or leave do not disturb others, and leave nothing behind."""

import http.client
import json
import re
import select
import socket
import threading
import time
from contextlib import ExitStack

import psutil
import pytest

from autotune.service.listening import listening_sockets
from autotune.storage.searches import Searches
from tests.building.page_server import TOKEN, page_server
from tests.building.queued_searches import wait_until
from tests.building.studies import open_store

HEALTH = "/api/v1/health"
WAIT_SECONDS = 0.6
MIB = 1024**2


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server that waits only a moment for its clients."""
    folder = tmp_path_factory.mktemp("slow")
    with page_server(folder, longest_wait_seconds=WAIT_SECONDS) as served:
        yield served


@pytest.fixture(scope="module")
def patient_server(tmp_path_factory):
    with page_server(tmp_path_factory.mktemp("patient")) as served:
        yield served


def connect(server, *, receive_bytes=None):
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", port_of(server)))
    return connection


def port_of(server):
    return int(server.address.rpartition(":")[2])


def head(server, line, **headers):
    """Returns the bytes of a request up to its body."""
    given = {"Host": f"127.0.0.1:{port_of(server)}", "Authorization": f"Bearer {TOKEN}", **headers}
    lines = [f"{line} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def get(server, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=30)
    connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}", **headers})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def listeners(server):
    _, text = get(server, "/metrics")
    return int(re.search(r"^autotune_streams (\d+)", text, re.MULTILINE).group(1))


def ninety_fifth_percentile(server, *, seconds):
    """Asks for the health again and again; returns the time that 95 % of the answers take."""
    took = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        assert get(server, HEALTH)[0] == 200
        took.append(time.monotonic() - began)
        time.sleep(0.02)
    return sorted(took)[int(0.95 * len(took))]


def rest_of(connection):
    """Returns what the server sends until it closes the connection."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


# -- slow to send ----------------------------------------------------------------------------------


def test_a_body_that_does_not_arrive_is_answered_with_408(server):
    with connect(server) as connection:
        connection.sendall(head(server, "POST /api/v1/searches", **{"Content-Length": 50}) + b"{")
        answer = rest_of(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"content-type: application/problem+json" in answer
    problem = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert problem["detail"] == f"the body has not arrived within {WAIT_SECONDS} s"


def test_a_body_that_arrives_a_byte_at_a_time_is_answered_with_408(server):
    with connect(server) as connection:
        own = {"Sec-Fetch-Site": "same-origin", "Content-Length": 50}
        connection.sendall(head(server, "POST /sign-in", **own))
        while not select.select([connection], [], [], WAIT_SECONDS / 4)[0]:
            connection.sendall(b"a")
        assert rest_of(connection).startswith(b"HTTP/1.1 408 ")


@pytest.mark.slow
@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\nHost: a", b"\r\n"])
def test_a_connection_without_a_whole_request_is_closed(server, begin):
    with connect(server) as connection:
        connection.sendall(begin)
        began = time.monotonic()
        assert b"200" not in rest_of(connection)
        assert time.monotonic() - began < 10 * WAIT_SECONDS


def test_headers_that_never_end_are_cut_off(server):
    with connect(server) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        sent = 0
        while not select.select([connection], [], [], WAIT_SECONDS / 10)[0]:
            sent += 1
            assert sent < 100
            connection.sendall(f"X-{sent}: a\r\n".encode())


def test_a_second_request_that_never_ends_is_cut_off(server):
    with connect(server) as connection:
        connection.sendall(head(server, f"GET {HEALTH}"))
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"GET / HTTP/1.1\r\nX: ")
        rest_of(connection)


@pytest.mark.slow
def test_a_stream_to_which_nothing_happens_stays_open(server):
    with connect(server) as connection:
        connection.sendall(head(server, "GET /api/v1/events"))
        time.sleep(4 * WAIT_SECONDS)
        server.say("notice", {"message": "still here"})
        received = b""
        while b"still here" not in received:
            received += connection.recv(65536)


def test_answers_on_one_connection_do_not_wait_for_an_acknowledgement():
    """asyncio sets TCP_NODELAY only for sockets that name their protocol."""
    for opened in listening_sockets("127.0.0.1", 0):
        with opened:
            assert opened.proto == socket.IPPROTO_TCP


@pytest.mark.slow
def test_fifty_slow_bodies_do_not_stop_others(patient_server):
    request = head(patient_server, "POST /api/v1/searches", **{"Content-Length": 1000})
    with ExitStack() as opened:
        slow = [opened.enter_context(connect(patient_server)) for _ in range(50)]
        for connection in slow:
            connection.sendall(request)
        has_ended = threading.Event()

        def dribble():
            while not has_ended.wait(1.0):
                for connection in slow:
                    connection.sendall(b" ")

        dribbling = threading.Thread(target=dribble)
        dribbling.start()
        try:
            assert ninety_fifth_percentile(patient_server, seconds=8) < 0.5
        finally:
            has_ended.set()
            dribbling.join()


# -- slow to read ----------------------------------------------------------------------------------


def test_clients_that_leave_in_the_middle_leave_nothing_behind(server):
    for line in ("GET /api/v1/events", "GET /studies/other", "GET /api/v1/studies/other/report"):
        for _ in range(5):
            with connect(server) as connection:
                connection.sendall(head(server, line))
    for _ in range(5):
        with connect(server) as connection:
            connection.sendall(head(server, "POST /sign-in", **{"Content-Length": 9}) + b"token")
    wait_until(lambda: listeners(server) == 0)
    assert get(server, HEALTH)[0] == 200


def test_a_stream_that_is_read_for_a_moment_leaves_nothing_behind(server):
    with ExitStack() as opened:
        for _ in range(10):
            connection = opened.enter_context(connect(server))
            connection.sendall(head(server, "GET /api/v1/events"))
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        wait_until(lambda: listeners(server) == 10)
    wait_until(lambda: listeners(server) == 0)


@pytest.mark.slow
def test_clients_that_never_read_a_stream_neither_fill_memory_nor_stay(server, caplog):
    """Events of 2 kB, 6,000 before, which the server remembers, and 12,000 after."""
    events = [("notice", {"message": "m" * 2000})] * 2000
    for _ in range(3):
        server.say_all(events)
    wait_until(lambda: events_seen(server) == events_stored(server))
    process = psutil.Process()
    with ExitStack() as opened:
        for _ in range(40):
            connection = opened.enter_context(connect(server, receive_bytes=4096))
            connection.sendall(head(server, "GET /api/v1/events"))
        wait_until(lambda: listeners(server) == 40)
        before_bytes = process.memory_info().rss
        for _ in range(6):
            server.say_all(events)
            assert ninety_fifth_percentile(server, seconds=0.5) < 0.5
        wait_until(lambda: events_seen(server) == events_stored(server))
        grown_bytes = process.memory_info().rss - before_bytes
        assert grown_bytes < 100 * MIB
        wait_until(lambda: listeners(server) == 0)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def events_seen(server):
    _, text = get(server, "/metrics")
    return int(re.search(r"^autotune_events_total (\d+)", text, re.MULTILINE).group(1))


def events_stored(server):
    with open_store(server.url) as store:
        return Searches(store.database).last_event()


@pytest.mark.slow
def test_clients_that_never_read_an_answer_do_not_stay(server):
    """The program that draws figures has 5 MB, more than a connection takes without its reader."""
    _, page = get(server, "/studies/other")
    path = re.search(r"/static/\w+/plotly.min.js", page).group(0)
    with ExitStack() as opened:
        ports = set()

        def ends_of_server():
            connections = psutil.Process().net_connections()
            return [one for one in connections if one.raddr and one.raddr.port in ports]

        for _ in range(20):
            connection = opened.enter_context(connect(server, receive_bytes=4096))
            ports.add(connection.getsockname()[1])
            connection.sendall(head(server, f"GET {path}"))
        wait_until(lambda: len(ends_of_server()) == 20)
        wait_until(lambda: not ends_of_server())
        assert get(server, HEALTH)[0] == 200
