"""A search that is told to stop ends: nothing of it runs on, and its trial is released.

Its processes are real, with a stand-in for the training. How the command ends, `test_search.py`
tests.
"""

import sqlite3
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest
from sqlalchemy import select

from autotune.errors import Stopped
from autotune.execution.device_slots import DeviceSlots
from autotune.execution.local import LocalExecutor
from autotune.execution.trial_options import TrialOptions
from autotune.storage.store import StudyStore
from autotune.storage.tables import ATTEMPTS
from autotune.study.events import TrialBegan, WaitingForDevice, WaitingForStorage
from autotune.study.prediction.prediction_cache import PredictionCache
from autotune.study.running.loop import StudySession
from autotune.study.running.running_study import RunningStudy
from autotune.study.workers.coordinator import Coordinator
from autotune.study.workers.retry import search_retry
from tests.building.studies import definition

STAND_IN = Path(__file__).parents[1] / "quick_study" / "stand_in.py"


class Search:
    """A search that is told to stop at the event `until`."""

    def __init__(self, folder, url, *, until):
        self.folder, self._until = folder, until
        self._was_said = False
        self.server_pids = []
        self.before_its_trials = lambda: None
        retry = search_retry(
            limit_seconds=600.0, listener=self.listener, check_stop=self.check_stop
        )
        self.store = StudyStore(url, create=True, busy_timeout_seconds=0.05, retry=retry)
        self.store.create_study(definition(sampler="random"), trials_wanted=1)

    def listener(self, event):
        self._was_said = self._was_said or isinstance(event, self._until)

    def should_stop(self):
        """In a trial: once its process has begun."""
        is_in_trial = (self.folder / "logs" / "trial-0.log").exists()
        return self._was_said and (is_in_trial or self._until is not TrialBegan)

    def check_stop(self):
        if self.should_stop():
            raise Stopped("the search was stopped")

    def run(self):
        study = definition(sampler="random")
        with (
            LocalExecutor(
                self.folder,
                should_stop=self.should_stop,
                server_command=(sys.executable, str(STAND_IN)),
            ) as executor,
            Coordinator(
                study,
                store=self.store,
                folder=self.folder,
                listener=self.listener,
            ) as shared,
        ):
            self.server_pids.append(executor.server_pid)
            session = StudySession(
                RunningStudy(
                    definition=study,
                    shared=shared,
                    prediction_cache=PredictionCache(study, store=self.store, predict=None),
                    folder=self.folder,
                    listener=self.listener,
                    trial_options=TrialOptions(trial_time_limit_seconds=600.0),
                ),
                executor=executor,
                should_stop=self.should_stop,
            )
            self.before_its_trials()
            session.run(trials_wanted=1, deadline=None)

    def states(self):
        with self.store._database.reading() as connection:
            return list(connection.scalars(select(ATTEMPTS.c.state)))

    def what_runs_on(self):
        return [pid for pid in self.server_pids if psutil.pid_exists(pid)]


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """begin(until=TrialBegan) is a search that stops there; its trials wait for `gate`."""
    monkeypatch.setenv("STAND_IN_GATE", str(tmp_path / "gate"))
    with ExitStack() as stores:

        def begin_search(until):
            search = Search(tmp_path, f"sqlite:///{tmp_path}/autotune.db", until=until)
            stores.enter_context(closing(search.store))
            return search

        yield begin_search


def test_stopped_in_a_trial_it_gives_the_trial_back_and_ends_its_processes(begin):
    search = begin(until=TrialBegan)
    with pytest.raises(Stopped):
        search.run()
    assert (search.states(), search.what_runs_on()) == (["given_back"], [])


def test_stopped_while_another_search_has_the_device_it_ends_without_a_trial(begin):
    search = begin(until=WaitingForDevice)
    device = definition().device
    with (
        DeviceSlots(device).slot(lambda: None),
        pytest.raises(Stopped),
    ):
        search.run()
    assert (search.states(), search.what_runs_on()) == ([], [])


def test_stopped_while_the_database_takes_nothing_it_ends_too(begin, tmp_path):
    search = begin(until=WaitingForStorage)
    holder = sqlite3.connect(tmp_path / "autotune.db", isolation_level=None)
    search.before_its_trials = lambda: holder.execute("BEGIN IMMEDIATE")
    with closing(holder), pytest.raises(Stopped):
        search.run()
    assert (search.states(), search.what_runs_on()) == ([], [])
