"""A server begins searches and leads, and nothing of them is lost whoever dies."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from autotune.service.processes import find_process
from autotune.service.retention import Retention
from autotune.storage.searches import NewSearch, Searches
from autotune.storage.store import StudyStore
from tests.building.queue_server import queue_server

PATIENCE_SECONDS = 60.0

SERVER = """
import sys
from pathlib import Path
from autotune.storage.database import Database
from tests.building.queue_server import queue_server
with queue_server(Database(sys.argv[2]), Path(sys.argv[1]), storage=sys.argv[2]):
    sys.stdin.read()
"""


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/studies/autotune.db"


@pytest.fixture
def database(url):
    with closing(StudyStore(url, create=True)) as store:
        yield store.database


@pytest.fixture
def queue(database):
    return Searches(database)


@pytest.fixture
def make_server(tmp_path, url, database):
    """A server that runs stand-ins and stops them within a second."""

    def make(**settings):
        return queue_server(database, tmp_path / "logs", storage=url, **settings)

    return make


def submit(queue, **request):
    return queue.submit(NewSearch(request=request, submitted_by="ada"))[0].id


def wait_until(is_so):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "nothing happens any more"
        time.sleep(0.02)


def trials_of(queue, number):
    return [
        event.data["trial"]["number"]
        for event in queue.events_after(0)
        if event.search == number and event.kind == "trial_ended"
    ]


def test_searches_run_one_after_the_other_until_the_queue_is_empty(queue, make_server):
    first, second = submit(queue, trials=2), submit(queue, trials=1)
    with make_server() as server:
        wait_until(lambda: queue.get(second).has_ended)
        assert server.leader.is_leading
    assert [queue.get(number).state for number in (first, second)] == ["finished", "finished"]
    assert queue.get(first).ended_at <= queue.get(second).started_at


def test_two_groups_of_devices_run_two_searches_at_once(queue, make_server):
    numbers = [submit(queue, trials=1, seconds=3.0) for _ in range(2)]
    with make_server(groups={"a": "1", "b": "1"}):
        wait_until(lambda: queue.counts().get("running") == 2)
        assert {queue.get(number).group for number in numbers} == {"a", "b"}
        for number in numbers:
            queue.cancel(number, by="ada")


def test_a_search_whose_process_dies_is_resumed_where_it_was(queue, make_server):
    number = submit(queue, trials=3, dies_at=1)
    with make_server():
        wait_until(lambda: queue.get(number).has_ended)
    search = queue.get(number)
    assert (search.state, search.run) == ("finished", 2)
    assert trials_of(queue, number) == [0, 1, 2]


@pytest.mark.slow
def test_a_server_that_stops_leaves_its_search_to_the_next_one(queue, make_server):
    number = submit(queue, trials=40, seconds=0.05)
    with make_server():
        wait_until(lambda: trials_of(queue, number))
    assert queue.get(number).state == "queued"
    with make_server():
        wait_until(lambda: queue.get(number).has_ended)
    assert trials_of(queue, number) == list(range(40))


def test_a_search_whose_process_was_stopped_before_it_could_say_so_is_no_loss(queue, make_server):
    number = submit(queue, trials=40, seconds=0.05)
    with make_server():
        wait_until(lambda: queue.get(number).state == "running")
    assert (queue.get(number).state, queue.get(number).losses) == ("queued", 0)


@pytest.mark.slow
def test_a_running_search_goes_on_when_its_server_is_killed_and_the_next_adopts_it(
    queue, make_server, url, tmp_path
):
    number = submit(queue, trials=60, seconds=0.05)
    program = [sys.executable, "-c", SERVER, str(tmp_path / "logs"), url]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as server:
        wait_until(lambda: trials_of(queue, number))
        server.kill()
    process = queue.get(number).process
    assert find_process(process) is not None
    with make_server() as server:
        wait_until(lambda: server.leader.is_leading)
        wait_until(lambda: queue.get(number).has_ended)
    search = queue.get(number)
    assert (search.state, search.run) == ("finished", 1)
    assert trials_of(queue, number) == list(range(60))


@pytest.mark.slow
def test_a_server_that_stops_also_stops_a_search_that_it_has_adopted(
    queue, make_server, url, tmp_path
):
    number = submit(queue, trials=1000, seconds=0.05)
    program = [sys.executable, "-c", SERVER, str(tmp_path / "logs"), url]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as server:
        wait_until(lambda: trials_of(queue, number))
        server.kill()
    with make_server() as server:
        wait_until(lambda: server.leader.is_leading)
    assert queue.get(number).state == "queued"
    queue.cancel(number, by="ada")


@pytest.mark.slow
def test_a_search_that_dies_while_no_server_is_there_is_resumed_by_the_next(
    queue, make_server, url, tmp_path
):
    number = submit(queue, trials=20, seconds=0.1)
    program = [sys.executable, "-c", SERVER, str(tmp_path / "logs"), url]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as server:
        wait_until(lambda: trials_of(queue, number))
        server.kill()
    os.kill(queue.get(number).process.pid, signal.SIGKILL)
    with make_server():
        wait_until(lambda: queue.get(number).has_ended)
    assert (queue.get(number).state, queue.get(number).run) == ("finished", 2)
    assert trials_of(queue, number) == list(range(20))


def test_a_second_server_waits_and_takes_the_lead_when_the_first_ends(queue, make_server):
    with make_server() as second:
        wait_until(lambda: second.leader.is_leading)
        with make_server() as standby:
            time.sleep(1.5)
            assert not standby.leader.is_leading
        assert second.leader.is_leading
    with make_server() as third:
        wait_until(lambda: third.leader.is_leading)


@pytest.mark.slow
def test_a_cancelled_search_that_does_not_stop_is_killed(queue, make_server):
    number = submit(queue, trials=100_000, seconds=0.05, ignores=True)
    with make_server():
        wait_until(lambda: trials_of(queue, number))
        queue.cancel(number, by="ada")
        wait_until(lambda: queue.get(number).has_ended)
    assert queue.get(number).state == "cancelled"


@pytest.mark.slow
def test_a_search_that_ends_with_its_process_killed_leaves_only_its_log(
    queue, make_server, tmp_path
):
    number = submit(queue, trials=100_000, seconds=0.05, ignores=True)
    (tmp_path / "logs" / f"{number}.files" / "1").mkdir(parents=True)
    with make_server():
        wait_until(lambda: trials_of(queue, number))
        queue.cancel(number, by="ada")
        wait_until(lambda: queue.get(number).has_ended)
    assert [path.name for path in (tmp_path / "logs").iterdir()] == [f"{number}.log"]


def test_the_process_of_a_search_does_not_get_the_token(queue, make_server, monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOTUNE_TOKEN", "secret")
    number = submit(queue)
    with make_server() as server:
        wait_until(lambda: queue.get(number).has_ended)
        assert server.worker.log_file(number).read_text() == "no token\n"


@pytest.mark.slow
def test_a_webhook_is_called_once_for_each_search_that_ends(queue, make_server):
    called = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            called.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Receiver) as receiver:
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        number = submit(queue)
        with make_server(webhook=f"http://127.0.0.1:{receiver.server_port}/"):
            wait_until(lambda: called)
            time.sleep(1.5)
        receiver.shutdown()
    assert len(called) == 1
    assert f'"id":{number},"state":"finished"'.encode() in called[0].replace(b" ", b"")


@pytest.mark.slow
@pytest.mark.parametrize("is_all_told", [False, True], ids=["only ada", "ada and all"])
def test_a_person_is_told_of_what_is_theirs_and_of_nothing_else(is_all_told, queue, make_server):
    called = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            called.append((self.path, json.loads(body)["search"]["submitted_by"]))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Receiver) as receiver:
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        of_bob, _ = queue.submit(NewSearch(request={}, submitted_by="bob"))
        of_ada = submit(queue)
        address = f"http://127.0.0.1:{receiver.server_port}"
        settings = {"webhook": f"{address}/all"} if is_all_told else {}
        webhooks = {"ada": f"{address}/ada"}
        with make_server(webhooks_of_people=lambda: webhooks, **settings):
            wait_until(lambda: queue.get(of_ada).has_ended and queue.get(of_bob.id).has_ended)
            wait_until(lambda: ("/ada", "ada") in called)
            time.sleep(3)
        receiver.shutdown()
    of_all = [("/all", "ada"), ("/all", "bob")] if is_all_told else []
    assert sorted(called) == [("/ada", "ada"), *of_all]


class _NotFound(BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_error(404)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(
    ("is_there", "reason"), [(True, "it answered 404"), (False, "Connection refused")]
)
def test_a_webhook_that_fails_is_logged_without_its_secret(
    is_there, reason, queue, make_server, caplog
):
    queue.cancel(submit(queue), by="ada")
    with HTTPServer(("127.0.0.1", 0), _NotFound) as receiver:
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        if not is_there:
            receiver.shutdown()
            receiver.server_close()
        place = f"127.0.0.1:{receiver.server_port}/secret-path?key=secret-key"
        with make_server(webhook=f"http://user:secret-word@{place}"):
            wait_until(lambda: "webhook" in caplog.text)
        if is_there:
            receiver.shutdown()
    assert reason in caplog.text
    assert "at 127.0.0.1 has failed" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.slow
def test_a_webhook_with_a_long_answer_is_not_waited_for(queue, make_server):
    has_gone = threading.Event()

    class Verbose(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(200)
            self.end_headers()
            try:
                for _ in range(1024):
                    self.wfile.write(bytes(2**16))
            except OSError:
                has_gone.set()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Verbose) as receiver:
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        submit(queue)
        with make_server(webhook=f"http://127.0.0.1:{receiver.server_port}/"):
            assert has_gone.wait(30)
        receiver.shutdown()


def test_old_logs_are_removed_and_young_ones_stay(tmp_path):
    old, young = tmp_path / "s" / "logs" / "old.log", tmp_path / "s" / "logs" / "young.log"
    old.parent.mkdir(parents=True)
    for file in (old, young):
        file.write_text("x" * 100)
    week_ago = time.time() - 7 * 86_400
    os.utime(old, (week_ago, week_ago))
    assert Retention(folder=tmp_path, keep_days=3).apply() == [old]
    assert young.exists()


def test_the_oldest_logs_are_removed_beyond_the_quota(tmp_path):
    files = [tmp_path / f"{number}.log" for number in range(3)]
    for age, file in enumerate(reversed(files), start=2):
        file.write_text("x" * 100)
        os.utime(file, (time.time() - age * 3600, time.time() - age * 3600))
    assert Retention(folder=tmp_path, quota_bytes=250).apply() == [files[0]]


def make_old(path, *, days):
    then = time.time() - days * 86_400
    for one in (*path.rglob("*"), path):
        os.utime(one, (then, then))


def test_old_allocation_histories_are_removed(tmp_path):
    snapshot = tmp_path / "s" / "snapshots" / "trial-0.pickle"
    snapshot.parent.mkdir(parents=True)
    snapshot.write_bytes(b"x")
    make_old(snapshot, days=7)
    assert Retention(folder=tmp_path, keep_days=3).apply() == [snapshot]


@pytest.fixture
def profiles(tmp_path):
    """The profiles of a study: one of a week ago, one of a day ago, and one of now."""
    profiles = tmp_path / "s" / "profiles"
    for number, days in ((1, 7), (2, 1), (3, 0)):
        folder = profiles / f"trial-{number}"
        (folder / "code").mkdir(parents=True)
        (folder / "trace.json.gz").write_bytes(b"x" * 100)
        (folder / "code" / "graph-0.py").write_bytes(b"x" * 50)
        make_old(folder, days=days)
    return profiles


def test_an_old_profile_is_removed_as_a_whole(profiles, tmp_path):
    assert Retention(folder=tmp_path, keep_days=3).apply() == [profiles / "trial-1"]
    assert sorted(one.name for one in profiles.iterdir()) == ["trial-2", "trial-3"]


def test_profiles_count_towards_the_quota_and_the_youngest_stays(profiles, tmp_path):
    removed = Retention(folder=tmp_path, quota_bytes=1).apply()
    assert removed == [profiles / "trial-1", profiles / "trial-2"]


def test_profiles_of_a_study_that_is_searched_stay(profiles, tmp_path):
    assert Retention(folder=tmp_path, quota_bytes=1).apply(active=["s"]) == []


def test_what_a_killed_profile_has_left_is_removed(tmp_path):
    left = tmp_path / "s" / "profiles" / ".trial-4-0123"
    left.mkdir(parents=True)
    (left / "trace.json.gz").write_bytes(b"x")
    make_old(left, days=7)
    assert Retention(folder=tmp_path, keep_days=3).apply() == [left]


def test_a_link_in_place_of_a_profile_is_not_followed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_bytes(b"x")
    make_old(elsewhere, days=7)
    work = tmp_path / "work"
    (work / "s" / "profiles").mkdir(parents=True)
    (work / "s" / "profiles" / "trial-1").symlink_to(elsewhere)
    assert Retention(folder=work, keep_days=3).apply() == []
    assert (elsewhere / "file").exists()
