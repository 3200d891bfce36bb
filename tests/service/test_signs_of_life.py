"""When a worker takes the process of a search for lost, and when it does not."""

import math
import time
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest

from autotune.analysis.queue_order import DeviceGroup
from autotune.service import processes
from autotune.service import worker as worker_module
from autotune.service.processes import find_process, kill_process, this_host
from autotune.service.settings import ServerSettings
from autotune.service.worker import Worker
from autotune.spec.queued_search import SEARCH_LEASE_SECONDS, SEARCH_RENEWAL_SECONDS
from autotune.storage.searches import NewSearch, Searches
from autotune.storage.store import StudyStore
from autotune.storage.tables import SEARCHES
from autotune.study.workers.liveness import LeaseWatch
from tests.building.postgres import PostgresServer, unavailable
from tests.building.queued_searches import wait_until
from tests.service.test_workers import started, submit, trials_of

HERE = DeviceGroup(machine=this_host())


@pytest.fixture
def database(tmp_path):
    with closing(StudyStore(f"sqlite:///{tmp_path}/queue.db", create=True)) as store:
        yield store.database


@pytest.fixture
def queue(database):
    queue = Searches(database)
    queue.submit(NewSearch(request={}, submitted_by="ada"))
    return queue


@contextmanager
def rounds_of_worker(queue, folder, *, groups=(HERE,)):
    """Yields a worker that looks at the queue when it is told to; its searches never begin."""
    worker = Worker(
        queue,
        SimpleNamespace(groups_here=set),
        ServerSettings(storage=f"sqlite:///{folder}/queue.db"),
        groups=groups,
        log_folder=folder,
        retention=SimpleNamespace(apply=lambda active: None),
        module="tests.building.never_begins",
    )
    try:
        yield worker
    finally:
        for child in worker._children.values():
            kill_process(child.process)
            child.popen.wait()


def let_the_lease_run_out(database):
    with database.writing() as connection:
        connection.execute(SEARCHES.update().values(lease_until=1.0))


def test_a_worker_renews_the_lease_of_a_process_that_has_not_begun(queue, database, tmp_path):
    with rounds_of_worker(queue, tmp_path) as worker:
        worker._round()
        let_the_lease_run_out(database)
        worker._round()
        search = queue.get(1)
        assert (search.state, search.run, search.is_expired) == ("running", 1, False)


def test_a_process_that_does_not_begin_at_all_is_killed_and_tried_again(
    queue, database, tmp_path, monkeypatch
):
    monkeypatch.setattr(worker_module, "START_SECONDS", 0.0)
    with rounds_of_worker(queue, tmp_path) as worker:
        worker._round()
        [child] = worker._children.values()
        wait_until(lambda: processes._find_search(child.process))  # it has executed its program
        worker._round()
        wait_until(lambda: find_process(child.process) is None)
        wait_until(lambda: child.how_it_ended() is not None)
        worker._round()
        search = queue.get(1)
        assert (search.state, search.losses) == ("queued", 1)
        assert "SIGKILL" in search.reason


def test_an_expired_lease_is_watched_before_its_search_counts_as_lost(queue, database, tmp_path):
    """As the database may have been away, so that no process could give a sign of life."""
    queue.claim_next(DeviceGroup(machine="elsewhere"), version="1")
    let_the_lease_run_out(database)
    with rounds_of_worker(queue, tmp_path, groups=()) as worker:
        for _ in range(3):
            worker._round()
        assert queue.get(1).state == "running"
        worker._leases._looked_at = -math.inf  # the longest that can have passed
        for _ in range(int(SEARCH_LEASE_SECONDS / 2 / SEARCH_RENEWAL_SECONDS)):
            worker._leases._looked_at = -math.inf
            worker._round()
        assert queue.get(1).state == "queued"


def test_of_an_outage_only_the_time_between_two_signs_of_life_counts():
    now = 0.0
    watch = LeaseWatch(
        lambda: now, lease_seconds=SEARCH_LEASE_SECONDS, renewal_seconds=SEARCH_RENEWAL_SECONDS
    )
    assert not watch.overdue({"a search": (17.0, False)})
    now = 3600.0
    assert not watch.overdue({"a search": (17.0, True)})
    now += SEARCH_LEASE_SECONDS / 4
    assert not watch.overdue({"a search": (18.0, True)})


@pytest.mark.slow
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_searches_on_two_machines_go_on_after_an_outage_of_the_database(tmp_path):
    with PostgresServer() as server:
        url = server.create_database("queue")
        with closing(StudyStore(url, create=True)) as store:
            queue = Searches(store.database)
            with (
                started("worker", url, tmp_path / "one", machine="1"),
                started("worker", url, tmp_path / "two", machine="2"),
            ):
                numbers = [submit(queue, trials=10_000, seconds=0.2) for _ in range(2)]
                wait_until(lambda: all(trials_of(queue, number) for number in numbers))
                with server.stopped():
                    time.sleep(SEARCH_LEASE_SECONDS + 5.0)
                known = [len(trials_of(queue, number)) for number in numbers]
                wait_until(
                    lambda: all(
                        len(trials_of(queue, number)) > before
                        for number, before in zip(numbers, known, strict=True)
                    )
                )
                assert [queue.get(number).run for number in numbers] == [1, 1]
                for number in numbers:
                    queue.cancel(number, by="ada")
                wait_until(lambda: all(queue.get(number).has_ended for number in numbers))
