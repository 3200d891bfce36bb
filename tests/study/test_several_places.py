"""A search with several trials in flight: real processes, with a stand-in for the training."""

import os
import sqlite3
import threading
from collections import Counter
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
from sqlalchemy import select

from autotune.errors import (
    InvalidInput,
    Stopped,
    StorageUnreachable,
    StudyMismatch,
    TrialLost,
)
from autotune.execution.local import LocalExecutor
from autotune.execution.tasks import Train
from autotune.spec.provenance import PerplexitySource
from autotune.spec.study import DEFAULT_STORAGE
from autotune.storage.store import StudyStore
from autotune.storage.tables import ATTEMPTS
from autotune.study.events import (
    AttemptLost,
    Notice,
    PlaceLeft,
    StudyOpened,
    TrialBegan,
    TrialEnded,
)
from autotune.study.request import SearchRequest
from autotune.study.search import search
from tests.building.trial_servers import STAND_IN, STAND_IN_COMMAND


class Observer:
    """A listener that knows what is in flight, and in which threads it was called."""

    def __init__(self):
        self.events, self.threads = [], set()
        self.in_flight, self.most_in_flight = {}, 0

    def __call__(self, event):
        self.events.append(event)
        self.threads.add(threading.get_ident())
        if isinstance(event, TrialBegan):
            self.in_flight[event.number] = event.device
            self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        if isinstance(event, TrialEnded):
            self.in_flight.pop(event.record.number, None)
        if isinstance(event, AttemptLost):
            self.in_flight.pop(event.number, None)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, one_trial_server):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def gate(folder, monkeypatch):
    """A file that trials wait for."""
    monkeypatch.setenv("STAND_IN_GATE", str(folder / "gate"))
    return folder / "gate"


def run(observer, *, make_executor=LocalExecutor, should_stop=lambda: False, **options):
    request = SearchRequest(
        **{
            "space": str(STAND_IN.with_name("space.toml")),
            "device": "cpu",
            "devices": "3",
            "sampler": "random",
            "predict": False,
            "fresh": True,
            "confirm": False,
            **options,
        }
    )
    return search(
        request,
        listener=observer,
        should_stop=should_stop,
        make_executor=partial(make_executor, server_command=STAND_IN_COMMAND),
    )


class Opened(Observer):
    """Opens the gate once so many trials are in flight."""

    def __init__(self, gate, *, at):
        super().__init__()
        self._gate, self._at = gate, at

    def __call__(self, event):
        super().__call__(event)
        if len(self.in_flight) >= self._at:
            self._gate.touch()


@pytest.fixture
def three_at_once(gate):
    """A search whose first trials end only once three are in flight."""
    observer = Opened(gate, at=3)
    return run(observer, name="three", trials=7), observer


def test_every_trial_has_one_result_and_as_many_run_as_there_are_places(three_at_once):
    result, observer = three_at_once
    assert observer.most_in_flight == 3
    assert Counter(event.record.number for event in observer.of(TrialEnded)) == Counter(range(7))
    assert all(trial.is_finished for trial in result.trials)


@pytest.mark.slow
def test_a_trial_names_its_place_and_events_come_in_one_thread(three_at_once):
    _, observer = three_at_once
    [opened] = observer.of(StudyOpened)
    assert list(opened.places) == ["cpu slot 1", "cpu slot 2", "cpu slot 3"]
    assert {event.device for event in observer.of(TrialBegan)} == set(opened.places)
    assert observer.threads == {threading.get_ident()}


def test_stopped_with_several_trials_in_flight_it_gives_each_back(gate):
    observer = Observer()
    with pytest.raises(Stopped):
        run(
            observer,
            name="stopped",
            trials=7,
            should_stop=lambda: len(observer.in_flight) == 3,
        )
    with closing(StudyStore(DEFAULT_STORAGE)) as store:
        with store._database.reading() as connection:
            assert list(connection.scalars(select(ATTEMPTS.c.state))) == ["given_back"] * 3
        assert store.attempts.running("stopped") == []


class LosingExecutor(LocalExecutor):
    """The second executor of a search loses its first trial, and its device with it."""

    made = 0

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        LosingExecutor.made += 1
        self._loses = LosingExecutor.made == 2

    def call(self, task, **options):
        future = super().call(task, **options)
        if self._loses and isinstance(task, Train):
            self.cancel(future)
            future = type(future)()
            future.set_exception(TrialLost("the GPU has fallen off the bus"))
        return future

    def checking_device(self, device):
        if self._loses:
            raise TrialLost("the device does not answer")
        return super().checking_device(device)


@pytest.mark.slow
def test_a_device_that_is_lost_is_left_and_its_trial_runs_elsewhere(gate):
    LosingExecutor.made = 0
    observer = Opened(gate, at=2)
    result = run(observer, name="lost", devices="2", trials=5, make_executor=LosingExecutor)
    [lost] = observer.of(AttemptLost)
    assert all(trial.is_finished for trial in result.trials)
    assert observer.of(PlaceLeft) == [
        PlaceLeft(device="cpu slot 2", reason="the device does not answer")
    ]
    assert [event.device for event in observer.of(TrialBegan) if event.number == lost.number] == [
        "cpu slot 2",
        "cpu slot 1",
    ]


class UnseenEvaluation(LocalExecutor):
    """Each training reports an evaluation that cannot be used."""

    def call(self, task, **options):
        called = super().call(task, **options)
        if not isinstance(task, Train):
            return called
        unseen = PerplexitySource(kind="training_loss", last_steps=5, unused_evaluation="unseen")
        future = Future()

        def pass_on(done):
            measurement = replace(done.result().measurement, perplexity_source=unseen)
            future.set_result(replace(done.result(), measurement=measurement))

        called.add_done_callback(pass_on)
        return future


@pytest.mark.slow
def test_that_an_evaluation_is_not_used_is_said_once_for_all_places(gate):
    observer = Opened(gate, at=3)
    run(observer, name="unseen", trials=5, make_executor=UnseenEvaluation)
    said = [event for event in observer.of(Notice) if "from here on perplexity" in event.message]
    assert len(said) == 1


@pytest.mark.slow
def test_several_trials_on_one_device_are_places_too(gate):
    observer = Opened(gate, at=2)
    run(observer, name="shared", devices=None, trials_per_device=2, trials=3)
    assert observer.most_in_flight == 2


@pytest.fixture
def one_cpu():
    """This process, and what it starts, may use one CPU only."""
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usable)})
    yield
    os.sched_setaffinity(0, usable)


@pytest.fixture
def shared(gate, one_cpu):
    """A study of two slots that share a CPU."""
    return run(Opened(gate, at=2), name="shared", devices="2", trials=3)


@pytest.mark.slow
def test_that_slots_shared_a_cpu_is_part_of_its_name(shared):
    assert shared.device.name.endswith(", 2 trials on 1 CPU")


@pytest.mark.slow
def test_what_slots_measured_that_share_a_cpu_is_not_reused_where_they_do_not(shared):
    observer = Observer()
    run(observer, name="unshared", devices="1", trials=3, fresh=False)
    (opened,) = observer.of(StudyOpened)
    assert (opened.is_new, opened.records) == (True, ())


@pytest.mark.slow
def test_a_study_of_slots_that_share_a_cpu_goes_on_with_as_many(shared):
    again = {"name": "shared", "space": None, "fresh": False}
    result = run(Observer(), devices="2", trials=4, **again)
    assert len(result.trials) > len(shared.trials)
    with pytest.raises(StudyMismatch, match="2 trials on 1 CPU, here is"):
        run(Observer(), devices="1", trials=5, **again)


@pytest.mark.slow
def test_workers_are_another_name_of_a_number_of_devices(gate):
    observer = Opened(gate, at=2)
    run(observer, name="workers", devices=None, workers=2, trials=3)
    assert observer.most_in_flight == 2


def test_a_device_that_does_not_exist_is_an_error():
    with pytest.raises(InvalidInput, match="there is no device cuda:7"):
        run(Observer(), name="none", device=None, devices="cuda:7", trials=1)


class LocksTheDatabase(Opened):
    """Opens the gate once the database takes nothing any more."""

    def __init__(self, gate, connection, *, at):
        super().__init__(gate, at=at)
        self._connection = connection

    def __call__(self, event):
        if isinstance(event, TrialBegan) and len(self.in_flight) + 1 == self._at:
            self._connection.execute("BEGIN IMMEDIATE")
        super().__call__(event)


class Together(LocalExecutor):
    """No training has ended before two have."""

    ended = ()

    def call(self, task, **options):
        called = super().call(task, **options)
        if not isinstance(task, Train):
            return called
        future = Future()

        def pass_on(done):
            Together.ended += ((future, done),)
            if len(Together.ended) == 2:
                for one, result in Together.ended:
                    one.set_result(result.result())

        called.add_done_callback(pass_on)
        return future


@pytest.mark.slow
def test_results_of_all_places_wait_on_disk_while_the_database_is_away(gate, folder):
    run(Opened(gate, at=1), name="away", devices="2", trials=1)
    gate.unlink()
    holder = sqlite3.connect(folder / "studies" / "autotune.db", isolation_level=None)
    again = {"name": "away", "space": None, "fresh": False, "database_wait": 0.5}
    locks, Together.ended = LocksTheDatabase(gate, holder, at=2), ()
    with closing(holder), pytest.raises(StorageUnreachable):
        run(locks, devices="2", trials=3, make_executor=Together, **again)
    observer = Observer()
    result = run(observer, devices="2", trials=3, **again)
    assert [trial.is_finished for trial in result.trials] == [True] * 3
    assert observer.of(TrialBegan) == []
