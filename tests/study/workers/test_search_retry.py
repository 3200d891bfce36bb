"""What a search reports, and what it says in the end, while its database is away."""

import sqlite3
from contextlib import ExitStack, closing

import pytest

from autotune.errors import Stopped, StorageUnreachable
from autotune.storage.store import StudyStore
from autotune.study.events import StorageBack, WaitingForStorage
from autotune.study.workers.retry import search_retry
from tests.building.studies import definition


class LockedDatabase:
    """A studies database that another program has locked."""

    def __init__(self, file, stores):
        self._url, self._stores = f"sqlite:///{file}", stores
        with closing(StudyStore(self._url, create=True)) as created:
            created.create_study(definition(), trials_wanted=1)
        self._holder = stores.enter_context(closing(sqlite3.connect(file, isolation_level=None)))

    def store(self, **policy):
        """Opens it as a search with this policy does, and locks it then."""
        retry = search_retry(**policy)
        store = StudyStore(self._url, busy_timeout_seconds=0.01, retry=retry)
        self._stores.enter_context(closing(store))
        self._holder.execute("BEGIN IMMEDIATE")
        return store

    def unlock(self):
        self._holder.execute("ROLLBACK")


@pytest.fixture
def locked(tmp_path):
    with ExitStack() as stores:
        yield LockedDatabase(tmp_path / "autotune.db", stores)


def test_the_search_hears_that_it_waits_for_how_long_at_most_and_that_the_database_is_back(locked):
    events = []

    def listener(event):
        events.append(event)
        if isinstance(event, WaitingForStorage):
            locked.unlock()

    store = locked.store(limit_seconds=60.0, listener=listener, check_stop=lambda: None)
    store.set_trials_wanted("by-hand", 3)
    assert [type(event) for event in events] == [WaitingForStorage, StorageBack]
    assert events[0].limit_seconds == 60.0
    assert "is locked by another process" in events[0].message


def test_after_the_limit_the_error_says_where_finished_results_are(locked):
    store = locked.store(limit_seconds=0.0, listener=lambda event: None, check_stop=lambda: None)
    with pytest.raises(StorageUnreachable, match="; waited 0") as raised:
        store.set_trials_wanted("by-hand", 3)
    assert raised.value.hint.endswith("; finished results wait in the work folder")


def test_a_search_that_is_stopped_stops_waiting(locked):
    def stop():
        raise Stopped("the search was stopped")

    store = locked.store(limit_seconds=600.0, listener=lambda event: None, check_stop=stop)
    with pytest.raises(Stopped):
        store.set_trials_wanted("by-hand", 3)
