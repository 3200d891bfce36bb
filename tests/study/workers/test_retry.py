"""Waiting for a database that is away, by a clock that the test moves."""

import pytest

from autotune.errors import Stopped, StorageUnavailable, StorageUnreachable
from autotune.study.events import StorageBack, WaitingForStorage
from autotune.study.workers.retry import DatabaseRetry


class Database:
    """A database that is away until `back_at`, by its clock."""

    def __init__(self, back_at=0.0, stop_at=1e9):
        self.now, self.back_at, self.stop_at = 0.0, back_at, stop_at
        self.events = []
        self.calls = 0

    def patience(self, limit_seconds=60.0):
        return DatabaseRetry(
            limit_seconds=limit_seconds,
            listener=self.events.append,
            check_stop=self.check_stop,
            clock=lambda: self.now,
            sleep=self.sleep,
        )

    def sleep(self, seconds):
        self.now += seconds

    def check_stop(self):
        if self.now >= self.stop_at:
            raise Stopped("stopped")

    def answer(self):
        self.calls += 1
        if self.now < self.back_at:
            raise StorageUnreachable("the studies database is away")
        return "answer"


def test_an_available_database_is_called_once_without_events():
    database = Database()
    assert database.patience()(database.answer) == "answer"
    assert (database.calls, database.events) == (1, [])


def test_what_failed_is_done_again_until_the_database_is_back():
    database = Database(back_at=30.0)
    assert database.patience()(database.answer) == "answer"


def test_it_says_once_that_it_waits_and_once_that_the_database_is_back():
    database = Database(back_at=30.0)
    database.patience()(database.answer)
    assert [type(event) for event in database.events] == [WaitingForStorage, StorageBack]
    assert database.events[1].seconds >= 30.0


def test_it_does_not_wait_beyond_its_limit():
    database = Database(back_at=1000.0)
    with pytest.raises(StorageUnreachable, match=r"waited 1 m 00 s") as raised:
        database.patience(limit_seconds=60.0)(database.answer)
    assert (database.now < 63.0, raised.value.exit_code) == (True, 75)


def test_a_stop_ends_the_waiting_at_once():
    database = Database(back_at=1000.0, stop_at=5.0)
    with pytest.raises(Stopped):
        database.patience()(database.answer)
    assert database.now < 5.5


def test_what_no_waiting_mends_is_not_waited_for():
    def damaged():
        raise StorageUnavailable("the file is malformed")

    database = Database()
    with pytest.raises(StorageUnavailable, match="malformed"):
        database.patience()(damaged)
    assert (database.now, database.events) == (0.0, [])


def test_the_pauses_grow_so_that_a_database_is_not_stormed():
    database = Database(back_at=60.0)
    database.patience(limit_seconds=100.0)(database.answer)
    assert database.calls < 50
