"""A study among its workers: whose a trial is, when it is taken from a worker, and what becomes of every result."""

import socket
import sqlite3
import time
from contextlib import ExitStack, closing
from dataclasses import asdict

import pytest
from sqlalchemy import select, update
from study_building import config, definition, measured, open_store

from autotune.errors import StorageAway
from autotune.execution.local import FinishedTrial
from autotune.spec.attempt import LEASE_SECONDS, MOST_RETRIES, RENEWAL_SECONDS
from autotune.storage.store import StudyStore
from autotune.storage.tables import ATTEMPTS
from autotune.study.events import ResultRefused
from autotune.study.workers.coordinator import WORKERS, Coordinator
from autotune.study.workers.heartbeat import LeaseHeartbeat
from autotune.study.workers.outbox import OUTBOX_FOLDER, Outbox, OutboxResult
from autotune.study.workers.retry import DatabaseRetry

MOST = 5


class Machines:
    """Workers of one study, on as many machines as are named, and the clock that they all look at."""

    def __init__(self, store, folder, workers):
        self.store, self._folder, self._workers = store, folder, workers
        self.now = 0.0
        self.events = []

    def worker(self, machine="here"):
        """Enters the study; leaves it at the end of the test, or with `leave`."""
        return self._workers.enter_context(self.new_worker(machine))

    def new_worker(self, machine="here"):
        listener = self.events.append
        return Coordinator(
            definition(),
            store=self.store,
            folder=self.folder(machine),
            listener=listener,
            retry=DatabaseRetry(limit_seconds=0.0, listener=listener, check_stop=lambda: None),
            clock=lambda: self.now,
        )

    def folder(self, machine="here"):
        return self._folder / machine

    def claim(self, worker, number=0):
        return worker.claim(config(number), most_trials=MOST)

    def dead_worker_with_an_attempt(self, machine="here", number=0):
        with self.new_worker(machine) as worker:
            return self.claim(worker, number)

    def look(self, worker, *, seconds, every=RENEWAL_SECONDS):
        for _ in range(int(seconds / every)):
            self.now += every
            worker.refresh()

    def expire(self):
        """As where the database's clock is set forward."""
        self._set(lease_until=0.0)

    def _set(self, **values):
        with self.store._database.writing() as connection:
            connection.execute(update(ATTEMPTS).values(**values))

    def states(self):
        with self.store._database.reading() as connection:
            return list(
                connection.scalars(
                    select(ATTEMPTS.c.state).order_by(ATTEMPTS.c.trial_id, ATTEMPTS.c.ordinal)
                )
            )

    def results(self):
        return [one.tokens_per_second for one in self.store.trials("by-hand") if one.is_finished]


@pytest.fixture
def machines(tmp_path):
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store, ExitStack() as workers:
        store.create_study(definition(), trials_wanted=MOST)
        yield Machines(store, tmp_path / "work", workers)


def finished(speed=1000.0):
    return FinishedTrial(measurement=measured(tokens_per_second=speed), seconds=1.0)


# -- whose a trial is ------------------------------------------------------------------------------


def test_a_trial_goes_to_one_worker(machines):
    one, two = machines.worker(), machines.worker()
    assert [machines.claim(worker) is None for worker in (one, two)] == [False, True]


def test_a_worker_sees_what_others_are_at_and_not_what_it_is_at_itself(machines):
    one, two = machines.worker(), machines.worker()
    machines.claim(one)
    one.refresh()
    two.refresh()
    assert (one.running, two.running) == (set(), {0})


def test_results_are_heard_once_and_in_the_order_they_came(machines):
    one, two = machines.worker(), machines.worker()
    attempts = [machines.claim(one, number) for number in range(3)]
    for attempt in (attempts[2], attempts[0], attempts[1]):
        one.keep(attempt, finished())
    assert [[record.number for record in two.refresh()] for _ in range(2)] == [[2, 0, 1], []]


def test_what_has_no_result_is_known_as_unfinished_until_it_has(machines):
    one, two = machines.worker(), machines.worker()
    attempt = machines.claim(one)
    two.refresh()
    before = list(two.unfinished)
    one.keep(attempt, finished())
    two.refresh()
    assert (before, list(two.unfinished)) == ([0], [])


# -- when it is taken from a worker ----------------------------------------------------------------


def test_the_attempt_of_a_worker_that_has_ended_here_is_given_up_at_once(machines):
    machines.dead_worker_with_an_attempt()
    machines.worker()
    assert machines.states() == ["given_up"]


@pytest.fixture
def worker_called_as_a_file(machines, tmp_path):
    """The lock file of another program, of which a row of the database says that it is a worker's."""
    lock = tmp_path / "project" / "poetry.lock"
    lock.parent.mkdir()
    lock.touch()
    machines.dead_worker_with_an_attempt()
    machines._set(worker=f"{socket.gethostname()[:80]}:1:{lock.with_suffix('')}")
    return lock


def test_no_file_goes_for_a_row_that_calls_a_worker_by_its_path(machines, worker_called_as_a_file):
    machines.worker().refresh()
    assert worker_called_as_a_file.exists()


def test_of_a_worker_that_a_row_calls_by_a_path_only_the_lease_says_whether_it_lives(
    machines, worker_called_as_a_file
):
    worker = machines.worker()
    before = machines.states()
    machines.expire()
    machines.look(worker, seconds=LEASE_SECONDS)
    assert (before, machines.states()) == (["running"], ["given_up"])


def test_the_attempt_of_a_worker_that_has_ended_elsewhere_runs_until_its_lease_is_over(machines):
    machines.dead_worker_with_an_attempt("elsewhere")
    worker = machines.worker()
    machines.look(worker, seconds=LEASE_SECONDS)
    assert machines.states() == ["running"]


def test_an_attempt_whose_lease_has_run_out_is_given_up_and_can_be_taken_again(machines):
    machines.dead_worker_with_an_attempt("elsewhere")
    worker = machines.worker()
    machines.expire()
    machines.look(worker, seconds=4 * RENEWAL_SECONDS)
    assert machines.states() == ["given_up"]
    assert machines.claim(worker).ordinal == 2


def test_a_clock_set_forward_takes_nothing_from_a_worker_that_renews(machines):
    here, elsewhere = machines.worker(), machines.worker("elsewhere")
    attempt = machines.claim(elsewhere)
    for _ in range(5):
        machines.store.attempts.renew(attempt.id)
        machines.expire()
        machines.look(here, seconds=RENEWAL_SECONDS, every=RENEWAL_SECONDS / 3)
    assert machines.states() == ["running"]


def test_a_clock_set_back_keeps_nothing_for_a_worker_that_does_not_renew(machines):
    machines.dead_worker_with_an_attempt("elsewhere")
    worker = machines.worker()
    machines._set(lease_until=1e12)
    machines.look(worker, seconds=3 * LEASE_SECONDS)
    assert machines.states() == ["given_up"]


@pytest.mark.parametrize("machine", ["here", "elsewhere"])
def test_a_database_that_was_away_for_longer_than_a_lease_takes_nothing_from_a_worker_that_lives(
    machines, machine
):
    """Nobody could renew meanwhile; who is first to see the database again must leave the others the time to."""
    mine, other = machines.worker(), machines.worker(machine)
    attempt = machines.claim(other)
    machines.look(mine, seconds=RENEWAL_SECONDS)
    machines.now += 10 * LEASE_SECONDS
    machines.expire()
    machines.look(mine, seconds=RENEWAL_SECONDS, every=RENEWAL_SECONDS / 3)
    assert machines.states() == ["running"]
    other.keep(attempt, finished())
    assert machines.states() == ["finished"]


def test_what_is_watched_is_forgotten_when_it_has_ended(machines):
    here, elsewhere = machines.worker(), machines.worker("elsewhere")
    attempts = [machines.claim(elsewhere, number) for number in range(4)]
    here.refresh()
    watched = len(here._watched)
    for attempt in attempts:
        elsewhere.keep(attempt, finished())
    here.refresh()
    assert (watched, len(here._watched)) == (4, 0)


def test_a_worker_learns_that_its_attempt_was_given_up(machines):
    attempt = machines.claim(machines.worker())
    machines.store.attempts.end(attempt.id, "given_up", cause="as overdue")
    with LeaseHeartbeat(machines.store.attempts, attempt.id, renewal_seconds=0.001) as lease:
        end = time.monotonic() + 10
        while not lease.is_lost and time.monotonic() < end:
            time.sleep(0.001)
    assert lease.is_lost


# -- what becomes of a result ----------------------------------------------------------------------


def test_what_a_dead_worker_left_in_the_spool_is_its_result(machines):
    attempt = machines.dead_worker_with_an_attempt()
    result = OutboxResult(
        attempt_id=attempt.id, number=0, measurement=measured(tokens_per_second=7.0), seconds=1.0
    )
    Outbox(machines.folder() / OUTBOX_FOLDER).put(result)
    machines.worker()
    assert (machines.results(), machines.states()) == ([7.0], ["finished"])


def test_a_late_result_is_refused_said_and_kept_aside(machines):
    here, elsewhere = machines.worker(), machines.worker("elsewhere")
    late = machines.claim(elsewhere)
    machines.expire()
    here.refresh()
    machines.look(here, seconds=4 * RENEWAL_SECONDS)
    here.keep(machines.claim(here), finished(1.0))
    elsewhere.keep(late, finished(2.0))
    assert (machines.results(), machines.states()) == ([1.0], ["late", "finished"])
    assert [event for event in machines.events if isinstance(event, ResultRefused)] == [
        ResultRefused(number=0)
    ]
    with machines.store._database.reading() as connection:
        kept = connection.scalar(select(ATTEMPTS.c.measurement).where(ATTEMPTS.c.id == late.id))
    assert kept == asdict(measured(tokens_per_second=2.0))


def test_a_result_of_an_attempt_that_the_database_does_not_know_stays_on_disk(machines):
    """As where the database was replaced by an older copy."""
    worker = machines.worker()
    attempt = machines.claim(worker)
    with machines.store._database.writing() as connection:
        connection.execute(ATTEMPTS.delete())
    worker.keep(attempt, finished())
    assert len(Outbox(machines.folder() / OUTBOX_FOLDER).left_over()) == 1


@pytest.fixture
def locked(machines):
    """A database that takes no result: somebody holds it for longer than anybody waits."""
    with closing(StudyStore(machines.store.url, busy_timeout_seconds=0.01)) as store:
        machines.store = store
        holder = sqlite3.connect(store.url.removeprefix("sqlite:///"), isolation_level=None)
        with closing(holder):
            yield lambda: holder.execute("BEGIN IMMEDIATE")


def test_a_result_that_the_database_does_not_take_waits_on_disk(machines, locked):
    worker = machines.worker()
    attempt = machines.claim(worker)
    locked()
    with pytest.raises(StorageAway):
        worker.keep(attempt, finished())
    assert [one.number for one in Outbox(machines.folder() / OUTBOX_FOLDER).waiting()] == [0]


def test_where_neither_database_nor_disk_take_a_result_it_says_that_it_will_be_measured_again(
    machines, locked
):
    worker = machines.worker()
    attempt = machines.claim(worker)
    locked()
    (machines.folder() / OUTBOX_FOLDER).write_text("a file where the folder would be")
    with pytest.raises(
        StorageAway, match=r"trial 0 could not be written to .* will be measured again"
    ):
        worker.keep(attempt, finished())


def test_what_could_not_be_given_back_is_given_up_by_the_next_worker_at_once(machines, locked):
    with machines.new_worker() as worker:
        attempt = machines.claim(worker)
        holder = locked()
        worker.give_back(attempt)
        assert machines.states() == ["running"]
    holder.execute("ROLLBACK")
    machines.worker()
    assert machines.states() == ["given_up"]


# -- losses ----------------------------------------------------------------------------------------


def lose(machines, worker, times):
    for _ in range(times):
        worker.lose(machines.claim(worker), cause="the device is gone")


def test_a_trial_that_was_lost_too_often_is_left_by_all_who_are_at_the_study(machines):
    worker = machines.worker()
    lose(machines, worker, MOST_RETRIES + 1)
    assert machines.claim(worker) is None


def test_a_later_search_tries_again_what_was_lost_too_often(machines):
    with machines.new_worker() as earlier:
        lose(machines, earlier, MOST_RETRIES + 1)
    assert machines.claim(machines.worker()).ordinal == MOST_RETRIES + 2


def test_who_joins_others_at_work_forgives_nothing(machines):
    first = machines.worker()
    lose(machines, first, MOST_RETRIES + 1)
    machines.claim(first, 1)
    assert machines.claim(machines.worker()) is None


# -- what workers leave ----------------------------------------------------------------------------


def test_workers_leave_no_lock_files(machines):
    for number in range(3):
        with machines.new_worker() as worker:
            worker.keep(machines.claim(worker, number), finished())
    assert list((machines.folder() / WORKERS).iterdir()) == []


def test_lock_files_of_dead_workers_go_with_the_next_worker(machines):
    for number in range(3):
        machines.dead_worker_with_an_attempt(number=number)
    with machines.new_worker():
        pass
    assert list((machines.folder() / WORKERS).iterdir()) == []
