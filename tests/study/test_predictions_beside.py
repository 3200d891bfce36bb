"""What is predicted while a trial runs: a search with stand-ins for trainings and predictions."""

import threading
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import Stopped, TrialLost
from autotune.execution import cpu_shares
from autotune.execution.flow import Flows, result_of
from autotune.execution.local import LocalExecutor
from autotune.execution.tasks import Predict, Train
from autotune.spec.config import TrainingConfig
from autotune.storage.store import StudyStore
from autotune.study.events import TrialBegan
from autotune.study.prediction.prediction_cache import PredictionCache
from autotune.study.prediction.predictions_beside import PredictionsBeside
from autotune.study.request import SearchRequest
from autotune.study.running import devices_of_search
from autotune.study.search import search
from studies.many_devices.virtual_places import VirtualTime
from studies.search_efficiency.stand_in import VirtualDevice
from tests.building import made_study
from tests.building.flows import as_flow
from tests.building.trial_servers import STAND_IN, STAND_IN_COMMAND

WAIT_SECONDS = 60


class Watched(LocalExecutor):
    """Opens the gate, for which trials wait, once enough has been predicted beside the first."""

    gate: Path
    enough = 0
    predicted: tuple = ()
    """What was asked for, whether a training ran then, and the answer."""
    trained = None

    def call(self, task, **options):
        called = super().call(task, **options)
        if isinstance(task, Train):
            Watched.trained = called
        if isinstance(task, Predict):
            is_beside = Watched.trained is not None and not Watched.trained.done()
            Watched.predicted += ((task.request.config, is_beside, called),)
            called.add_done_callback(self.count)
        return called

    def count(self, _):
        if sum(beside and answer.done() for _, beside, answer in self.predicted) >= self.enough:
            self.gate.touch()


class LosesThoseBeside(Watched):
    """What predicts beside a trial is lost, as where the machine kills it."""

    def call(self, task, **options):
        called = super().call(task, **options)
        if not isinstance(task, Predict) or not self.predicted[-1][1]:
            return called
        self.cancel(called)
        lost = Future()
        called.add_done_callback(lambda _: lost.set_exception(TrialLost("it was killed")))
        return lost


class OpensLater(Watched):
    """Opens the gate a while after a training has begun."""

    def call(self, task, **options):
        if isinstance(task, Train):
            threading.Timer(1.5, self.gate.touch).start()
        return super().call(task, **options)


@pytest.fixture
def run(tmp_path, monkeypatch, one_trial_server):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAND_IN_GATE", str(tmp_path / "gate"))
    monkeypatch.setattr(Watched, "gate", tmp_path / "gate", raising=False)
    monkeypatch.setattr(Watched, "predicted", ())
    monkeypatch.setattr(Watched, "trained", None)
    monkeypatch.setattr(devices_of_search, "processes_beside", lambda *, places: 2)

    def run(*, enough, executor=Watched, events=None, should_stop=lambda: False, **options):
        monkeypatch.setattr(Watched, "enough", enough)
        request = SearchRequest(
            **{
                "space": str(STAND_IN.with_name("space.toml")),
                "device": "cpu",
                "name": "beside",
                "max_mem": 80 * 2**20,
                "trial_time_limit": 20.0,
                "fresh": True,
                "confirm": False,
                "trials": 4,
                **options,
            }
        )
        return search(
            request,
            listener=(lambda _: None) if events is None else events.append,
            should_stop=should_stop,
            make_executor=partial(executor, server_command=STAND_IN_COMMAND),
        )

    return run


@pytest.fixture
def found(run):
    """A search whose first trial ends only once three configurations were predicted beside it."""
    return run(enough=3)


@pytest.mark.slow
def test_what_may_come_next_is_predicted_while_a_trial_runs(found):
    assert sum(is_beside for _, is_beside, _ in Watched.predicted) >= 3
    assert {trial.outcome for trial in found.trials} <= {"ok", "crashed"}


@pytest.mark.slow
def test_no_configuration_is_predicted_twice(found):
    counted = Counter(config for config, _, _ in Watched.predicted)
    assert set(counted.values()) == {1}


@pytest.mark.slow
def test_a_prediction_beside_a_trial_that_is_lost_is_made_where_it_is_needed(run):
    result = run(enough=3, executor=LosesThoseBeside)
    assert [trial.is_finished for trial in result.trials] == [True] * 4
    assert [one for one in Watched.predicted if not one[1]]


@pytest.mark.slow
def test_a_search_that_is_stopped_ends_what_it_predicts_beside_its_trial(run, monkeypatch):
    monkeypatch.setenv("STAND_IN_SECONDS", "2")
    events = []
    with pytest.raises(Stopped):
        run(
            enough=10**6,
            events=events,
            should_stop=lambda: any(
                is_beside and not answer.done() for _, is_beside, answer in Watched.predicted
            ),
        )
    assert len([event for event in events if isinstance(event, TrialBegan)]) == 1
    began = time.monotonic()
    while not all(answer.done() for _, _, answer in Watched.predicted):
        assert time.monotonic() < began + WAIT_SECONDS


@pytest.mark.slow
def test_where_nothing_more_is_to_be_tried_nothing_is_predicted_beside_a_trial(run):
    run(enough=10**6, trials=1, executor=OpensLater)
    assert len(Watched.predicted) == 1  # the baseline, by its place


CONFIG = TrainingConfig()


@pytest.fixture
def cache(tmp_path):
    definition = made_study.definition("beside")
    with closing(StudyStore(f"sqlite:///{tmp_path}/studies.db", create=True)) as store:
        store.create_study(definition, trials_wanted=1)
        yield PredictionCache(definition, store=store, predict=as_flow(made_study.forecast))


def test_what_was_begun_beside_a_trial_is_not_wanted_again_even_where_it_was_lost(cache):
    def lost(config):
        raise TrialLost("it was killed")

    beside = PredictionsBeside(cache)
    assert beside.wants(CONFIG)
    result_of(beside.predict(CONFIG, as_flow(lost)))
    assert not cache.is_known(CONFIG)
    assert not beside.wants(CONFIG)


def test_a_place_waits_for_its_own_prediction_and_not_for_that_of_another_place(cache):
    answer: Future = Future()
    went_on = []

    def own(config):
        yield answer
        return made_study.forecast(config)

    def wait(predict):
        yield from beside.wait_for(CONFIG, predict)
        went_on.append(predict)

    beside, flows, of_another = PredictionsBeside(cache), Flows(), as_flow(made_study.forecast)
    flows.begin(beside.predict(CONFIG, own))
    flows.begin(wait(own))
    flows.begin(wait(of_another))
    assert went_on == [of_another]
    flows.settle(answer, None)
    flows.wait(0.0)
    assert went_on == [of_another, own]
    assert cache.is_known(CONFIG)


def test_in_virtual_time_a_prediction_rests_while_a_training_is_timed():
    device = VirtualDevice()
    virtual = VirtualTime([device], seconds_of_cache=lambda _: 0.0)
    virtual.places(None, listener=lambda _: None)
    device.timed.append((2.0, 10.0))
    flow = device.takes_time(device, lambda: device.spend("prediction", 3.0), rests=True)
    prediction: Any = next(flow)
    assert prediction.ends_at == 11.0
    device.timed.append((10.5, 12.0))
    assert prediction.ends_at == 12.5


@pytest.mark.parametrize(
    ("cores", "places", "processes"), [(3, 1, 0), (4, 1, 2), (64, 8, 4), (16, 8, 0)]
)
def test_each_place_with_four_cores_has_processes_for_predictions(
    cores, places, processes, monkeypatch, tmp_path
):
    monkeypatch.setattr(cpu_shares, "usable_cpus", lambda: tuple(range(cores)))
    monkeypatch.setattr(cpu_shares, "_CPU_MAX", tmp_path / "cpu.max")
    assert cpu_shares.processes_beside(places=places) == processes


@pytest.mark.parametrize(("quota", "processes"), [("max 100000", 4), ("300000 100000", 0)])
def test_a_container_has_the_cores_of_its_quota(quota, processes, monkeypatch, tmp_path):
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(cpu_shares, "usable_cpus", lambda: tuple(range(64)))
    monkeypatch.setattr(cpu_shares, "_CPU_MAX", tmp_path / "cpu.max")
    assert cpu_shares.processes_beside(places=1) == processes
