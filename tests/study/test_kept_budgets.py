"""A time budget is kept, confirmation included, however slow the machine becomes: in virtual time.

The clock goes on by what trials and measurements take, and by nothing else that matters.
"""

import random
import time

import pytest

from autotune.execution.in_turn import LEAST_ROUNDS
from autotune.spec.confirmation import PairedSpeed
from autotune.study.events import ConfirmationTime, Notice, TrialEnded
from autotune.study.progress import Progress
from autotune.study.request import SearchRequest
from autotune.study.running.places import TrialPlace
from autotune.study.running.running_study import RunningStudy
from autotune.study.search import search
from tests.building.studies import open_store
from tests.quick_study.quick_executor import QuickExecutor
from tests.quick_study.worker import SPACE

STARTUP_SHARE = 0.3
"""Of a trial: what a training in turn takes before its first round."""


class Machine:
    """Its trials take about `trial_seconds`, and trainings in turn `slowdown` times as long."""

    def __init__(self, monkeypatch, *, trial_seconds, slowdown=1.0, seed=0):
        self._trial_seconds, self._slowdown = trial_seconds, slowdown
        self._draw = random.Random(seed)
        self._passed = 0.0
        self.longest = 0.0
        monotonic = time.monotonic

        def clock():
            return monotonic() + self._passed

        monkeypatch.setattr(time, "monotonic", clock)
        for kind in (RunningStudy, TrialPlace):
            monkeypatch.setitem(kind.__init__.__kwdefaults__, "clock", clock)

    def spend(self, seconds):
        self._passed += seconds

    @property
    def passed(self):
        return self._passed

    def trial(self):
        """Spend what a trial takes, and return it."""
        seconds = self._trial_seconds * self._draw.uniform(0.5, 1.5)
        self.longest = max(self.longest, seconds)
        self.spend(seconds)
        return seconds

    def in_turn(self, trainings, *, rounds, seconds):
        """Spend what a run in turn takes, and return its rounds."""
        of_trial = self._trial_seconds * self._slowdown
        self.spend(STARTUP_SHARE * of_trial * trainings)
        ends = self._passed + seconds - STARTUP_SHARE * of_trial * trainings
        for done in range(rounds):
            if done >= LEAST_ROUNDS and self._passed > ends:
                return done
            self.spend((1 - STARTUP_SHARE) * of_trial * trainings / rounds)
        return rounds

    def executor(self, *arguments, **options):
        made = VirtualExecutor(*arguments, **options)
        made.machine = self
        return made


class VirtualExecutor(QuickExecutor):
    machine: Machine

    def _train(self, config):
        self._seconds = 0.0
        finished = super()._train(config)
        ended = finished.result()
        object.__setattr__(ended, "seconds", self.machine.trial())
        return finished

    def time_in_turn(self, definition, trainings, *, rounds, seconds, **options):
        rounds = self.machine.in_turn(len(trainings), rounds=rounds, seconds=seconds)
        return super().time_in_turn(definition, trainings, rounds=rounds, **options)


@pytest.fixture
def searched(tmp_path, monkeypatch):
    """searched(machine, 60.0) returns the confirmations and events of a search."""
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path}/quick.db"

    def run(machine, time_budget):
        events = []
        request = SearchRequest(
            name="quick",
            storage=url,
            space=str(SPACE),
            max_mem=1024**3,
            device="cpu",
            sampler="random",
            fresh=True,
            time_budget=time_budget,
        )
        search(request, make_executor=machine.executor, listener=events.append)
        with open_store(url) as store:
            return store.confirmations("quick"), events

    return run


@pytest.mark.parametrize("slowdown", [1.0, 3.0])
@pytest.mark.parametrize("trial_seconds", [3.0, 12.0, 40.0])
def test_a_search_ends_within_its_budget_or_a_trials_length(
    trial_seconds, slowdown, searched, monkeypatch
):
    budget = 120.0
    machine = Machine(monkeypatch, trial_seconds=trial_seconds, slowdown=slowdown)
    searched(machine, budget)
    assert machine.passed <= budget + max(0.15 * budget, machine.longest)


def test_a_confirmation_for_which_the_rest_does_not_suffice_is_left_out_and_said(
    searched, monkeypatch
):
    machine = Machine(monkeypatch, trial_seconds=25.0)
    confirmations, events = searched(machine, 60.0)
    assert not any(isinstance(one, PairedSpeed) for one in confirmations)
    notes = [event.message for event in events if isinstance(event, Notice)]
    assert any("the time for confirmation is used up" in note for note in notes)
    assert any("autotune confirm quick --time-budget none" in note for note in notes)


def test_fewer_trials_are_confirmed_where_there_is_no_time_for_all(searched, monkeypatch):
    """Trainings of 12 s in turn with a partner: in 39 s there are two, and not four."""
    machine = Machine(monkeypatch, trial_seconds=12.0)
    confirmations, _ = searched(machine, 110.0)
    first = [one for one in confirmations if isinstance(one, PairedSpeed)]
    assert 1 <= len(first) < 3


def test_the_time_left_counts_the_confirmation_and_is_never_none_left(searched, monkeypatch):
    machine = Machine(monkeypatch, trial_seconds=10.0)
    progress = Progress(preferences=SearchRequest().preferences)
    _, events = searched(machine, 120.0)
    shown = []
    for event in events:
        progress.note(event)
        if isinstance(event, TrialEnded | ConfirmationTime):
            shown.append(progress.seconds_left())
    assert shown
    assert all(left is None or left > 0 for left in shown)
