"""Workers of several machines and a server share a queue: real processes, with stand-in searches.

A job of Slurm counts as a machine, so a number of one in its environment makes a machine of each.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from autotune.service.devices import groups_of
from autotune.service.processes import machine_of, this_host
from autotune.service.settings import ServerSettings
from autotune.shipped.device_name import cpu_name
from autotune.spec.queued_search import SearchProcess
from autotune.storage.searches import NewSearch, Searches
from autotune.storage.store import StudyStore
from tests.building.queued_searches import TOKEN, running_service, wait_until
from tests.building.service import BEARER, serving

ROOT = Path(__file__).parents[2]


@pytest.fixture
def queue(store_url):
    with closing(StudyStore(store_url, create=True)) as store:
        yield Searches(store.database)


class Started(subprocess.Popen):
    """A server or a worker, and what it has said once it had begun."""

    said = ""


@contextmanager
def started(command, storage, folder, *words, machine="", **variables):
    """Yields a server or a worker of a machine, in a folder of its own, once it has begun."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "AUTOTUNE_TOKEN": TOKEN, **variables}
    if machine:
        environment["SLURM_JOB_ID"] = machine
    program = [sys.executable, "-m", "tests.building.queue_process", command, "--port", "0"]
    with Started(
        [*program, "--storage", storage, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            process.said = process.stderr.readline()
            assert process.said.startswith("autotune"), process.said + process.stderr.read()
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                process.communicate(timeout=60)


def submit(queue, **request):
    return queue.submit(NewSearch(request=request, submitted_by="ada"))[0].id


def trials_of(queue, number):
    return [
        event.data["trial"]["number"]
        for event in queue.events_after(0, limit=1_000_000)
        if event.search == number and event.kind == "trial_ended"
    ]


@pytest.mark.slow
def test_two_workers_and_a_server_share_a_queue_and_each_search_runs_once(
    queue, store_url, tmp_path
):
    with ExitStack() as opened:
        for command, machine in (("serve", ""), ("worker", "1"), ("worker", "2")):
            folder = tmp_path / f"{command}-{machine}"
            opened.enter_context(started(command, store_url, folder, machine=machine))
        assert len(queue.groups()) == 3
        numbers = [submit(queue, trials=6, seconds=0.2) for _ in range(9)]
        wait_until(lambda: all(queue.get(number).has_ended for number in numbers))
    searches = [queue.get(number) for number in numbers]
    assert {(search.state, search.run) for search in searches} == {("finished", 1)}
    assert len({search.host for search in searches}) == 3
    assert all(trials_of(queue, number) == list(range(6)) for number in numbers)


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["by a signal", "as its time is over"])
def test_a_search_goes_on_elsewhere_when_its_worker_ends(queue, store_url, tmp_path, ends):
    number = submit(queue, trials=10_000, seconds=0.1)
    words = [] if ends == "by a signal" else ["--time-limit", "15s"]
    with started("worker", store_url, tmp_path / "one", *words, machine="1") as first:
        wait_until(lambda: trials_of(queue, number))
        if ends == "by a signal":
            first.send_signal(signal.SIGTERM)
        _, said = first.communicate(timeout=60)
    assert first.returncode == (143 if ends == "by a signal" else 0), said
    assert "the next one goes on with its searches" in said
    assert "Traceback" not in said
    assert (queue.get(number).state, queue.groups()) == ("queued", [])
    before = len(trials_of(queue, number))
    with started("worker", store_url, tmp_path / "two", machine="2"):
        wait_until(lambda: len(trials_of(queue, number)) > before)
        search = queue.get(number)
        queue.cancel(number, by="ada")
        wait_until(lambda: queue.get(number).has_ended)
    assert (search.run, search.losses) == (2, 0)
    assert trials_of(queue, number) == list(range(len(trials_of(queue, number))))


@pytest.mark.slow
def test_a_search_goes_on_when_its_worker_is_killed(queue, store_url, tmp_path):
    number = submit(queue, trials=60, seconds=0.1)
    with started("worker", store_url, tmp_path / "one", machine="1") as worker:
        wait_until(lambda: trials_of(queue, number))
        worker.kill()
    wait_until(lambda: queue.get(number).has_ended)
    assert (queue.get(number).state, queue.get(number).run) == ("finished", 1)
    assert trials_of(queue, number) == list(range(60))


@pytest.mark.slow
def test_a_search_of_a_machine_that_is_lost_is_taken_up_elsewhere(queue, store_url, tmp_path):
    number = submit(queue, trials=10_000, seconds=0.1)
    with (
        started("worker", store_url, tmp_path / "one", machine="1") as lost,
        started("serve", store_url, tmp_path / "server", "--no-worker"),
    ):
        wait_until(lambda: trials_of(queue, number))
        with started("worker", store_url, tmp_path / "two", machine="2"):
            lost.kill()
            os.kill(queue.get(number).process.pid, signal.SIGKILL)
            before = len(trials_of(queue, number))
            wait_until(lambda: len(trials_of(queue, number)) > before)
            search = queue.get(number)
            queue.cancel(number, by="ada")
            wait_until(lambda: queue.get(number).has_ended)
    assert (search.run, search.losses) == (2, 0)
    assert machine_of(search.host).endswith("2")
    assert trials_of(queue, number) == list(range(len(trials_of(queue, number))))


@pytest.mark.slow
def test_two_workers_of_one_machine_share_its_devices(queue, store_url, tmp_path):
    numbers = [submit(queue, trials=4, seconds=0.2) for _ in range(4)]
    with (
        started("worker", store_url, tmp_path / "one", machine="1"),
        started("worker", store_url, tmp_path / "two", machine="1"),
    ):
        most = 0

        def have_ended():
            nonlocal most
            most = max(most, queue.counts().get("running", 0))
            return all(queue.get(number).has_ended for number in numbers)

        wait_until(have_ended)
    assert most == 1


@pytest.mark.slow
def test_a_search_of_a_kind_that_nobody_has_waits_while_others_run(queue, store_url, tmp_path):
    waiting, running = submit(queue, kind="NVIDIA H100"), submit(queue, kind="cpu")
    with started("worker", store_url, tmp_path / "one", "--devices", "cpu"):
        wait_until(lambda: queue.get(running).has_ended)
        assert queue.get(waiting).state == "queued"
        told = queue.places()[waiting].waits_for
    assert told == "a worker with NVIDIA H100, and none is there"


@pytest.mark.slow
def test_a_server_has_the_log_of_a_search_of_a_worker(queue, postgres_url, tmp_path):
    """The worker has it in its own folder, and tells it to servers alone."""
    with closing(StudyStore(postgres_url, create=True)) as store:
        searches = Searches(store.database)
        number = submit(searches)
        with (
            started("worker", postgres_url, tmp_path / "one", machine="1") as worker,
            started("serve", postgres_url, tmp_path / "server", "--no-worker") as server,
        ):
            wait_until(lambda: searches.get(number).has_ended)
            url = server.stdout.readline().strip().rstrip("/")
            log = httpx.get(f"{url}/api/v1/searches/{number}/log", headers=BEARER)
            devices = httpx.get(f"{url}/api/v1/devices", headers=BEARER).json()
            address = worker.said.split()[-1]
            asked = httpx.get(f"{address}/api/v1/searches/{number}/log", headers=BEARER)
    assert (log.status_code, log.text) == (200, "no token\n")
    assert [group["kind"] for group in devices["groups"]] == [cpu_name()]
    assert asked.status_code == 401


@pytest.mark.slow
def test_kills_of_workers_and_servers_lose_and_double_nothing(queue, store_url, tmp_path):
    """KILLS of the environment says how many; half of them kill the searches of a machine, too."""
    chance = random.Random(0)
    numbers = []
    machines = {"": "serve", "1": "worker", "2": "worker"}
    with ExitStack() as opened:

        def start(machine):
            folder = tmp_path / f"machine-{machine}"
            return opened.enter_context(
                started(machines[machine], store_url, folder, machine=machine)
            )

        processes = {machine: start(machine) for machine in machines}
        for _ in range(int(os.environ.get("KILLS", "6"))):
            while queue.counts().get("queued", 0) < 3:
                numbers.append(submit(queue, trials=chance.randint(1, 40), seconds=0.05))
            time.sleep(chance.uniform(0.0, 3.0))
            machine = chance.choice(list(machines))
            searches = psutil.Process(processes[machine].pid).children(recursive=True)
            processes[machine].kill()
            if chance.random() < 0.5:
                for each in searches:
                    with suppress(psutil.NoSuchProcess):
                        each.kill()
            running = queue.find(states=["running"])[0]
            assert len({(search.host, search.group) for search in running}) == len(running)
            processes[machine] = start(machine)
        wait_until(lambda: not {"queued", "running"} & queue.counts().keys())
    for number in numbers:
        search = queue.get(number)
        assert (search.state, trials_of(queue, number)) == (
            "finished",
            list(range(search.request["trials"])),
        )


# -- within a server -------------------------------------------------------------------------------


def test_a_server_without_a_worker_begins_no_search(tmp_path):
    with running_service(f"sqlite:///{tmp_path}/a.db", worker=False) as client:
        number = client.post("/api/v1/searches", json={"max_mem": "48MiB"}).json()["id"]
        search = client.get(f"/api/v1/searches/{number}").json()
        assert (search["state"], search["machine"]) == ("queued", "")
        assert search["waits_for"] == "a worker, and none is there"
        assert client.get("/api/v1/devices").json()["groups"] == []


def test_a_worker_knows_no_person_and_answers_servers(tmp_path):
    storage = f"sqlite:///{tmp_path}/a.db"
    with (
        serving(storage, port=8322) as server,
        serving(storage, is_worker=True, token=None) as worker,
    ):
        service = server.app.state.service
        named = service.tokens.add("ada", role="admin")
        secret = service.others._http.headers["authorization"]
        own = worker.app.state.settings.owner_token
        answers = [
            worker.get("/api/v1/searches", headers={"Authorization": token}).status_code
            for token in (secret, f"Bearer {TOKEN}", f"Bearer {named}")
        ]
        assert answers == [200, 401, 401]
        assert worker.get("/api/v1/health").json()["role"] == "worker"
        found = server.get(
            "/api/v1/searches",
            headers={"Authorization": f"Bearer {own}", "Host": "127.0.0.1:8322"},
        )
        assert found.status_code == 401


def test_a_job_of_slurm_is_a_machine_of_its_own(monkeypatch):
    hosts = set()
    for job in ("", "7", "8"):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        hosts.add(this_host.__wrapped__())
    assert len(hosts) == 3
    name = socket.gethostname()
    assert set(map(machine_of, hosts)) == {name, f"{name}, job 7", f"{name}, job 8"}
    assert all(SearchProcess(host=host, pid=1, started_at=0.0) for host in hosts)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"devices": "cpu"}, [("default", "cpu", cpu_name(), 1)]),
        ({"groups": {"a": "cpu", "b": "cpu"}}, [(name, "cpu", cpu_name(), 1) for name in "ab"]),
        ({"ray": "auto", "devices": "4"}, [("default", "", "", 4)]),
    ],
    ids=str,
)
def test_the_groups_of_a_machine_say_their_kind(settings, found):
    groups = groups_of(ServerSettings(**settings))
    assert [(each.name, each.type, each.kind, each.number) for each in groups] == found
