"""A study with several workers: who has a trial, when attempts expire, and how results arrive."""

import socket
import sqlite3
import time
from contextlib import ExitStack, closing

import pytest
from sqlalchemy import select, update

from autotune.errors import StorageUnavailable, StorageUnreachable
from autotune.spec.attempt import LEASE_SECONDS, MAX_RETRIES, RENEWAL_SECONDS, FinishedTrial
from autotune.spec.reading import parse
from autotune.spec.result import Measurement
from autotune.storage.retry import RetryPolicy
from autotune.storage.store import StudyStore
from autotune.storage.tables import ATTEMPTS, REVISION, VERSION
from autotune.study.events import ResultRejected
from autotune.study.workers.coordinator import WORKERS, Coordinator
from autotune.study.workers.heartbeat import LeaseHeartbeat
from autotune.study.workers.outbox import OUTBOX_FOLDER, Outbox, OutboxConfirmation, OutboxResult
from tests.building.studies import config, definition, measured, open_store
from tests.building.whole_study import CONFIRMATIONS

MOST = 5


class Machines:
    """Workers of one study, on as many machines as are named, and the clock that they share."""

    def __init__(self, store, folder, workers):
        self.store, self._folder, self._workers = store, folder, workers
        self.now = 0.0
        self.events = []

    def worker(self, machine="here"):
        """Enters the study; leaves it at the end of the test, or with `leave`."""
        return self._workers.enter_context(self.new_worker(machine))

    def new_worker(self, machine="here"):
        return Coordinator(
            definition(),
            store=self.store,
            folder=self.folder(machine),
            listener=self.events.append,
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


# -- claims ----------------------------------------------------------------------------------------


def test_a_trial_is_claimed_by_one_worker(machines):
    one, two = machines.worker(), machines.worker()
    assert [machines.claim(worker) is None for worker in (one, two)] == [False, True]


def test_running_trials_are_those_of_other_workers(machines):
    one, two = machines.worker(), machines.worker()
    machines.claim(one)
    one.refresh()
    two.refresh()
    assert (one.running, two.running) == (set(), {0})


def test_results_are_returned_once_and_in_the_order_of_their_arrival(machines):
    one, two = machines.worker(), machines.worker()
    attempts = [machines.claim(one, number) for number in range(3)]
    for attempt in (attempts[2], attempts[0], attempts[1]):
        one.store_result(attempt, finished())
    assert [[record.number for record in two.refresh()] for _ in range(2)] == [[2, 0, 1], []]


def test_a_trial_is_unfinished_until_it_has_a_result(machines):
    one, two = machines.worker(), machines.worker()
    attempt = machines.claim(one)
    two.refresh()
    before = list(two.unfinished)
    one.store_result(attempt, finished())
    two.refresh()
    assert (before, list(two.unfinished)) == ([0], [])


# -- expired attempts ------------------------------------------------------------------------------


def test_the_attempt_of_a_dead_worker_of_this_machine_expires_at_once(machines):
    machines.dead_worker_with_an_attempt()
    machines.worker()
    assert machines.states() == ["given_up"]


@pytest.fixture
def worker_called_as_a_file(machines, tmp_path):
    """The lock file of another program, which a row of the database names as a worker's."""
    lock = tmp_path / "project" / "poetry.lock"
    lock.parent.mkdir()
    lock.touch()
    machines.dead_worker_with_an_attempt()
    machines._set(worker=f"{socket.gethostname()[:80]}:1:{lock.with_suffix('')}")
    return lock


def test_no_file_is_removed_for_a_worker_name_that_is_a_path(machines, worker_called_as_a_file):
    machines.worker().refresh()
    assert worker_called_as_a_file.exists()


def test_a_worker_whose_name_is_a_path_is_dead_once_its_lease_is_over(
    machines, worker_called_as_a_file
):
    worker = machines.worker()
    before = machines.states()
    machines.expire()
    machines.look(worker, seconds=LEASE_SECONDS)
    assert (before, machines.states()) == (["running"], ["given_up"])


def test_the_attempt_of_a_dead_worker_elsewhere_runs_until_its_lease_is_over(machines):
    machines.dead_worker_with_an_attempt("elsewhere")
    worker = machines.worker()
    machines.look(worker, seconds=LEASE_SECONDS)
    assert machines.states() == ["running"]


def test_an_attempt_whose_lease_has_run_out_expires_and_can_be_claimed_again(machines):
    machines.dead_worker_with_an_attempt("elsewhere")
    worker = machines.worker()
    machines.expire()
    machines.look(worker, seconds=4 * RENEWAL_SECONDS)
    assert machines.states() == ["given_up"]
    assert machines.claim(worker).ordinal == 2


def test_a_clock_set_forward_ends_no_lease_that_is_renewed(machines):
    here, elsewhere = machines.worker(), machines.worker("elsewhere")
    attempt = machines.claim(elsewhere)
    for _ in range(5):
        machines.store.attempts.renew([attempt.id])
        machines.expire()
        machines.look(here, seconds=RENEWAL_SECONDS, every=RENEWAL_SECONDS / 3)
    assert machines.states() == ["running"]


def test_a_clock_set_back_extends_no_lease_that_is_not_renewed(machines):
    machines.dead_worker_with_an_attempt("elsewhere")
    worker = machines.worker()
    machines._set(lease_until=1e12)
    machines.look(worker, seconds=3 * LEASE_SECONDS)
    assert machines.states() == ["given_up"]


@pytest.mark.parametrize("machine", ["here", "elsewhere"])
def test_a_database_away_for_longer_than_a_lease_ends_no_attempt_of_a_living_worker(
    machines, machine
):
    """No worker could renew; the first one back must leave the others the time to renew."""
    mine, other = machines.worker(), machines.worker(machine)
    attempt = machines.claim(other)
    machines.look(mine, seconds=RENEWAL_SECONDS)
    machines.now += 10 * LEASE_SECONDS
    machines.expire()
    machines.look(mine, seconds=RENEWAL_SECONDS, every=RENEWAL_SECONDS / 3)
    assert machines.states() == ["running"]
    other.store_result(attempt, finished())
    assert machines.states() == ["finished"]


def test_an_ended_attempt_is_no_longer_watched(machines):
    here, elsewhere = machines.worker(), machines.worker("elsewhere")
    attempts = [machines.claim(elsewhere, number) for number in range(4)]
    here.refresh()
    watched = len(here._watch._seen)
    for attempt in attempts:
        elsewhere.store_result(attempt, finished())
    here.refresh()
    assert (watched, len(here._watch._seen)) == (4, 0)


def test_a_worker_learns_that_its_attempt_has_expired(machines):
    attempt = machines.claim(machines.worker())
    machines.store.attempts.end(attempt.id, "given_up", cause="as overdue")
    heartbeat = LeaseHeartbeat(machines.store.attempts, renewal_seconds=0.001)
    with heartbeat, heartbeat.holding(attempt.id) as lease:
        end = time.monotonic() + 10
        while not lease.is_lost and time.monotonic() < end:
            time.sleep(0.001)
    assert lease.is_lost


def test_the_leases_of_all_attempts_of_a_worker_are_renewed_together(machines):
    worker = machines.worker()
    attempts = [machines.claim(worker, number) for number in range(3)]
    machines.expire()
    assert machines.store.attempts.renew([one.id for one in attempts[:2]]) == {
        one.id for one in attempts[:2]
    }
    running = machines.store.attempts.running(definition().name)
    assert [one.is_expired for one in running] == [False, False, True]


# -- results ---------------------------------------------------------------------------------------


def test_the_outbox_of_a_dead_worker_is_delivered(machines):
    attempt = machines.dead_worker_with_an_attempt()
    result = OutboxResult(attempt_id=attempt.id, number=0, finished=finished(7.0))
    Outbox(machines.folder() / OUTBOX_FOLDER).put(result)
    machines.worker()
    assert (machines.results(), machines.states()) == ([7.0], ["finished"])


def test_a_late_result_is_rejected_reported_and_stored_with_its_attempt(machines):
    here, elsewhere = machines.worker(), machines.worker("elsewhere")
    late = machines.claim(elsewhere)
    machines.expire()
    here.refresh()
    machines.look(here, seconds=4 * RENEWAL_SECONDS)
    here.store_result(machines.claim(here), finished(1.0))
    elsewhere.store_result(late, finished(2.0))
    assert (machines.results(), machines.states()) == ([1.0], ["late", "finished"])
    assert [event for event in machines.events if isinstance(event, ResultRejected)] == [
        ResultRejected(number=0)
    ]
    with machines.store._database.reading() as connection:
        kept = connection.scalar(select(ATTEMPTS.c.measurement).where(ATTEMPTS.c.id == late.id))
    assert parse(Measurement, kept) == measured(tokens_per_second=2.0)


def test_a_result_of_an_attempt_that_the_database_does_not_know_stays_on_disk(machines):
    """As where the database was replaced by an older copy."""
    worker = machines.worker()
    attempt = machines.claim(worker)
    with machines.store._database.writing() as connection:
        connection.execute(ATTEMPTS.delete())
    worker.store_result(attempt, finished())
    assert len(Outbox(machines.folder() / OUTBOX_FOLDER).left_over()) == 1


def test_a_database_that_a_later_autotune_has_upgraded_ends_a_worker_and_its_result_waits(machines):
    def set_revision(revision):
        with machines.store._database.writing() as connection:
            connection.execute(update(VERSION).values(version_num=revision))

    with machines.new_worker() as worker:
        attempt = machines.claim(worker)
        set_revision("9999")
        for write in (
            lambda: worker.store_result(attempt, finished(7.0)),
            lambda: worker.store_confirmation(PAIRED),
            lambda: machines.claim(worker, 1),
            lambda: worker.record_failure(attempt, cause="the device is gone"),
        ):
            with pytest.raises(StorageUnavailable, match=rf"schema 9999, .* up to {REVISION}"):
                write()
        assert (machines.results(), machines.states()) == ([], ["running"])
    set_revision(REVISION)
    machines.worker()
    assert (machines.results(), machines.states()) == ([7.0], ["finished"])
    assert machines.store.confirmations("by-hand") == [PAIRED]


@pytest.fixture
def waits():
    """What is called when the store begins to wait for its database; nothing unless added."""
    return []


@pytest.fixture
def locked(machines, waits):
    """A database that takes no result: somebody holds it for longer than anybody waits."""

    def begin_to_wait(message):
        for wait in waits:
            wait()

    retry = RetryPolicy(limit_seconds=0.2, on_waiting=begin_to_wait)
    url = machines.store.url
    with closing(StudyStore(url, busy_timeout_seconds=0.01, retry=retry)) as store:
        machines.store = store
        holder = sqlite3.connect(store.url.removeprefix("sqlite:///"), isolation_level=None)
        with closing(holder):
            yield lambda: holder.execute("BEGIN IMMEDIATE")


def test_a_result_that_the_database_does_not_accept_waits_on_disk(machines, locked):
    worker = machines.worker()
    attempt = machines.claim(worker)
    locked()
    with pytest.raises(StorageUnreachable):
        worker.store_result(attempt, finished())
    assert [one.number for one in Outbox(machines.folder() / OUTBOX_FOLDER).waiting()] == [0]


def test_where_database_and_disk_fail_the_error_says_that_the_trial_will_be_measured_again(
    machines, locked
):
    worker = machines.worker()
    attempt = machines.claim(worker)
    locked()
    (machines.folder() / OUTBOX_FOLDER).write_text("a file where the folder would be")
    with pytest.raises(
        StorageUnreachable, match=r"trial 0 could not be written to .* will be measured again"
    ):
        worker.store_result(attempt, finished())


def test_where_the_disk_has_space_again_the_result_waits_there_for_the_database(
    machines, locked, waits
):
    worker = machines.worker()
    attempt = machines.claim(worker)
    locked()
    outbox = machines.folder() / OUTBOX_FOLDER
    outbox.write_text("a file where the folder would be")
    waits.append(outbox.unlink)
    with pytest.raises(StorageUnreachable, match=r"locked by another process; waited \S+ s"):
        worker.store_result(attempt, finished())
    assert [one.number for one in Outbox(outbox).waiting()] == [0]


def test_an_attempt_that_could_not_be_released_expires_with_the_next_worker(machines, locked):
    with machines.new_worker() as worker:
        attempt = machines.claim(worker)
        holder = locked()
        worker.release_attempt(attempt)
        assert machines.states() == ["running"]
    holder.execute("ROLLBACK")
    machines.worker()
    assert machines.states() == ["given_up"]


# -- confirmations ---------------------------------------------------------------------------------

PAIRED = CONFIRMATIONS[0]


def test_a_confirmation_is_stored_and_waits_no_more(machines):
    machines.worker().store_confirmation(PAIRED)
    assert machines.store.confirmations("by-hand") == [PAIRED]
    assert list((machines.folder() / OUTBOX_FOLDER).iterdir()) == []


def test_a_confirmation_that_the_database_does_not_accept_is_delivered_by_the_next_worker(
    machines, locked
):
    with machines.new_worker() as worker:
        holder = locked()
        with pytest.raises(StorageUnreachable):
            worker.store_confirmation(PAIRED)
        assert machines.store.confirmations("by-hand") == []
    holder.execute("ROLLBACK")
    machines.worker()
    assert machines.store.confirmations("by-hand") == [PAIRED]


def test_a_confirmation_whose_file_outlived_its_delivery_is_stored_once(machines):
    """As where the process was killed between the two."""
    waiting = OutboxConfirmation(
        id="c" * 32, study_begun=machines.store.begun("by-hand"), confirmation=PAIRED
    )
    Outbox(machines.folder() / OUTBOX_FOLDER).put(waiting)
    machines.store.add_confirmation("by-hand", PAIRED, confirmation_id=waiting.id)
    machines.worker()
    assert machines.store.confirmations("by-hand") == [PAIRED]


def test_a_confirmation_of_another_study_of_that_name_stays_on_disk(machines):
    """As where the database was removed, and the study begun anew."""
    outbox = Outbox(machines.folder() / OUTBOX_FOLDER)
    outbox.put(
        OutboxConfirmation(
            id="c" * 32, study_begun="2026-01-01T00:00:00.000000", confirmation=PAIRED
        )
    )
    machines.worker()
    assert (machines.store.confirmations("by-hand"), len(outbox.left_over())) == ([], 1)


def test_where_database_and_disk_fail_the_error_says_that_the_confirmation_is_measured_again(
    machines, locked
):
    worker = machines.worker()
    locked()
    (machines.folder() / OUTBOX_FOLDER).write_text("a file where the folder would be")
    with pytest.raises(
        StorageUnreachable, match=r"the last confirmation could not be written to .* measured again"
    ):
        worker.store_confirmation(PAIRED)


def test_a_confirmation_that_is_swept_while_it_is_written_is_written_again(
    machines, locked, monkeypatch
):
    worker = machines.worker()
    locked()

    def join_while_it_is_written(point):
        monkeypatch.undo()
        assert point == "result written, not in place"
        outbox = Outbox(machines.folder() / OUTBOX_FOLDER)
        outbox.sweep(outbox.half_written())

    monkeypatch.setattr(f"{Outbox.__module__}.failpoint", join_while_it_is_written)
    with pytest.raises(StorageUnreachable):
        worker.store_confirmation(PAIRED)
    (waiting,) = Outbox(machines.folder() / OUTBOX_FOLDER).waiting()
    assert waiting.confirmation == PAIRED


# -- losses ----------------------------------------------------------------------------------------


def lose(machines, worker, times):
    for _ in range(times):
        worker.record_failure(machines.claim(worker), cause="the device is gone")


def test_a_trial_that_failed_too_often_is_left_by_all_workers_of_the_search(machines):
    worker = machines.worker()
    lose(machines, worker, MAX_RETRIES + 1)
    assert machines.claim(worker) is None


def test_a_later_search_retries_a_trial_that_failed_too_often(machines):
    with machines.new_worker() as earlier:
        lose(machines, earlier, MAX_RETRIES + 1)
    assert machines.claim(machines.worker()).ordinal == MAX_RETRIES + 2


def test_a_worker_that_joins_others_forgives_no_failures(machines):
    first = machines.worker()
    lose(machines, first, MAX_RETRIES + 1)
    machines.claim(first, 1)
    assert machines.claim(machines.worker()) is None


# -- what workers leave ----------------------------------------------------------------------------


def test_workers_leave_no_lock_files(machines):
    for number in range(3):
        with machines.new_worker() as worker:
            worker.store_result(machines.claim(worker, number), finished())
    assert list((machines.folder() / WORKERS).iterdir()) == []


def test_the_next_worker_removes_the_lock_files_of_dead_workers(machines):
    for number in range(3):
        machines.dead_worker_with_an_attempt(number=number)
    with machines.new_worker():
        pass
    assert list((machines.folder() / WORKERS).iterdir()) == []
