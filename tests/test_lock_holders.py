"""Who holds a lock that somebody waits for."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from autotune.errors import StorageUnreachable
from autotune.storage.store import StudyStore
from autotune.system.lock_holders import holder_of
from tests.building.studies import definition, open_store

HOLDER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""
needs_list_of_locks = pytest.mark.skipif(
    not Path("/proc/locks").exists(), reason="this system does not list locks"
)


@pytest.fixture
def database(tmp_path):
    """A studies database that another process has locked, with that process."""
    file = tmp_path / "autotune.db"
    url = f"sqlite:///{file}"
    with open_store(url) as store:
        store.create_study(definition(), trials_wanted=2)
    with (
        closing(StudyStore(url, busy_timeout_seconds=0.0)) as store,
        subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process,
    ):
        process.stdout.readline()
        yield store, process
        process.stdin.close()


@needs_list_of_locks
def test_a_locked_database_names_the_process_that_has_it(database):
    store, process = database
    with pytest.raises(StorageUnreachable) as raised:
        store.set_trials_wanted("by-hand", 3)
    assert f"is locked by process {process.pid} of user " in raised.value.message
    assert ", which runs since " in raised.value.message


def test_a_file_that_nobody_locks_has_no_holder(tmp_path):
    file = tmp_path / "free"
    file.touch()
    assert holder_of([file, tmp_path / "missing"]) == ""
