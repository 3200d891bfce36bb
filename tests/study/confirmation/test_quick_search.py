"""What a search does about its confirmations, with trials that take no time."""

from concurrent.futures import Future

import pytest

from autotune.errors import TrialLost
from autotune.spec.confirmation import PairedSpeed, RepeatedSpeed
from autotune.study.request import SearchRequest
from autotune.study.running.loop import TRIALS_PER_REPEAT
from autotune.study.search import search
from tests.building.studies import open_store
from tests.quick_study.quick_executor import QuickExecutor
from tests.quick_study.worker import SPACE


class Machine(QuickExecutor):
    """Loses every repetition of the baseline, and every training in turn."""

    def call(self, task, *, log_name=None, **options):
        if log_name is not None and "repeat" in log_name:
            lost = Future()
            lost.set_exception(TrialLost("the process was killed"))
            return lost
        return super().call(task, log_name=log_name, **options)

    def check_device(self, device):
        """It works again."""

    def time_in_turn(self, *arguments, **options):
        raise TrialLost("the process was killed")


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """stored(trials=8) runs a search and returns its result and what was measured beside it."""
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path}/quick.db"

    def run(executor=QuickExecutor, **options):
        request = SearchRequest(
            name="quick",
            storage=url,
            space=str(SPACE),
            max_mem=1024**3,
            device="cpu",
            sampler="random",
            fresh=True,
            **options,
        )
        result = search(request, make_executor=executor)
        with open_store(url) as store:
            return result, store.confirmations("quick")

    return run


def repeats(confirmations):
    return [one for one in confirmations if isinstance(one, RepeatedSpeed)]


def paired(confirmations):
    return [one for one in confirmations if isinstance(one, PairedSpeed)]


def test_the_baseline_is_repeated_once_for_every_eight_trained_trials(stored):
    result, confirmations = stored(trials=20)
    trained = sum(trial.was_trained for trial in result.trials)
    assert len(repeats(confirmations)) == trained // TRIALS_PER_REPEAT
    assert len(result.trials) == 20


def test_without_confirmation_nothing_is_measured_beside_the_trials(stored):
    _, confirmations = stored(trials=12, confirm=False)
    assert confirmations == []


def test_a_machine_that_loses_repetitions_and_runs_in_turn_does_not_end_the_search(stored):
    result, confirmations = stored(Machine, trials=12)
    assert result.pick is not None
    assert len(result.trials) == 12
    assert repeats(confirmations)
    assert all(one.tokens_per_second is None for one in repeats(confirmations))
    assert paired(confirmations)
    assert all(one.failure == "the process was killed" for one in paired(confirmations))


def test_a_search_that_goes_on_with_more_trials_confirms_again(stored):
    _, first = stored(trials=4)
    _, second = stored(trials=12)
    assert second[: len(first)] == first
    assert len(second) > len(first)
