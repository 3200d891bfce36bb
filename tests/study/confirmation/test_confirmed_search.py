"""Searches whose finalists are trained again, in turn, after the trials."""

import json
import os
from pathlib import Path

import pytest

import autotune
from autotune.analysis.ablation import Effect
from autotune.analysis.tolerance import Tolerance
from autotune.errors import Stopped
from autotune.execution.device_slots import DeviceSlots
from autotune.reporting.figures.ablation import compute
from autotune.spec.config import TrainingConfig
from autotune.spec.confirmation import PairedSpeed, VariantMeasurement
from autotune.study.events import ConfirmationTime, Confirming, WaitingForDevice
from autotune.study.records import view_of
from tests.building.commands import run_here
from tests.building.studies import definition, open_store

SPACE = """
[techniques]
checkpointing = ["none", "block"]
optimizer_fusion = ["foreach", "backward"]

[[configurations]]
name = "both"
checkpointing = "block"
optimizer_fusion = "backward"

[defaults]
micro_batch_size = 4

[workload]
layers = 2
width = 32
heads = 2
sequence_length = 32
global_batch = 4
steps = 30
warmup_steps = 2
evaluation_sequences = 4
"""
NAME = "confirmed"
URL = "sqlite:///studies/autotune.db"
TRIALS = 2
BASELINE, BOTH = 0, 1
SMALLEST = autotune.Preferences(prefer="smallest", tolerance=Tolerance(speed=0.9))
"""So large a tolerance needs few measurements."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, one_trial_server):
    before = os.getcwd()
    folder = tmp_path_factory.mktemp("confirmed")
    os.chdir(folder)
    Path("space.toml").write_text(SPACE)
    yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def stopped(folder):
    """The study after a search that was stopped while it confirmed: its trials are stored."""
    began = []

    def listen(event):
        if isinstance(event, Confirming):
            began.append(event)

    with pytest.raises(Stopped):
        search(listener=listen, should_stop=lambda: bool(began))
    return len(shown()["trials"]), stored()


@pytest.fixture(scope="module")
def held_up(stopped):
    """What a search with two slots did after its trials while another one had a slot: events."""
    events = []

    def listen(event):
        events.append(event)

    # It has slot 0, so that the search has slot 1 for what is no confirmation.
    with (
        DeviceSlots(definition("any").device, places=2).slot(lambda: None),
        pytest.raises(Stopped),
    ):
        search(
            trials_per_device=2,
            listener=listen,
            should_stop=lambda: any(isinstance(one, WaitingForDevice) for one in events),
        )
    return events, stored()


@pytest.fixture(scope="module")
def result(held_up):
    return search()


def search(**options):
    return autotune.search(
        name=NAME,
        space="space.toml",
        max_mem="1GiB",
        trials=TRIALS,
        predict=False,
        preferences=SMALLEST,
        **options,
    )


def command(*arguments):
    return run_here(*arguments, "--storage", URL, folder=Path.cwd())


def shown():
    ended = command("show", NAME, "--json")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def stored():
    with open_store(URL, create=False) as store:
        return store.confirmations(NAME)


def runs_of(number):
    return shown()["trials"][number]["confirmations"]


def test_a_confirmation_that_was_stopped_has_lost_no_trial_and_goes_on(stopped, result):
    trials, confirmations = stopped
    assert (trials, confirmations) == (TRIALS, [])
    assert len(stored()) > 0


def test_a_confirmation_waits_until_no_other_trial_runs_on_the_device(held_up):
    events, confirmations = held_up
    assert isinstance(events[-1], WaitingForDevice)
    assert any(isinstance(event, ConfirmationTime) for event in events)
    assert confirmations == []


def test_a_search_stores_speeds_in_turn_with_the_baseline_and_counts_them_as_no_trials(result):
    paired = [one for one in stored() if isinstance(one, PairedSpeed)]
    assert {one.config for one in paired} == {result.trials[BOTH].config}
    assert {one.partner for one in paired} == {result.trials[BASELINE].config}
    assert all(one.speed_ratio > 0 for one in paired)
    assert len(result.trials) == TRIALS


def test_the_json_has_the_measurements_behind_a_speed_and_its_interval(result):
    for trial in shown()["trials"]:
        low, high = trial["tokens_per_second_interval"]
        assert trial["confirmations"] >= 1
        assert low < trial["tokens_per_second"] < high


def test_the_trials_are_marked_as_confirmed(result):
    ended = command("show", NAME)
    assert f"confirmed {runs_of(BOTH)}x" in " ".join(ended.stdout.split())


def test_the_same_search_again_measures_nothing(result):
    before = stored()
    search(confirm_share=0.0)
    assert stored() == before


@pytest.mark.slow
def test_confirm_measures_one_trial_until_it_has_three_measurements(result):
    ended = command("confirm", NAME, "--trial", str(BOTH), "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["trials"][BOTH]["confirmations"] == max(3, runs_of(BOTH))
    assert len(shown()["trials"]) == TRIALS


@pytest.mark.slow
def test_a_trial_that_is_confirmed_is_measured_once_more_when_it_is_asked_for(result):
    command("confirm", NAME, "--trial", str(BOTH))
    before = runs_of(BOTH)
    autotune.confirm(NAME, trial=BOTH, storage=URL)
    assert runs_of(BOTH) == before + 1


@pytest.mark.slow
def test_a_confirmation_without_a_limit_measures_the_pick_without_each_of_its_techniques(result):
    confirmed = autotune.confirm(NAME, time_budget="none", storage=URL, preferences=SMALLEST)
    assert confirmed.pick.number == BOTH
    variants = [one for one in stored() if isinstance(one, VariantMeasurement)]
    assert {one.config for one in variants} == {
        TrainingConfig(micro_batch_size=4, checkpointing="block"),
        TrainingConfig(micro_batch_size=4, optimizer_fusion="backward"),
    }
    assert {one.measurement.outcome for one in variants} == {"ok"}
    assert len(confirmed.trials) == TRIALS


def test_the_pick_without_a_technique_has_numbers_on_top_of_the_others(result):
    autotune.confirm(NAME, time_budget="none", storage=URL, preferences=SMALLEST)
    with open_store(URL, create=False) as store:
        steps = compute(view_of(store, NAME, SMALLEST)).steps
    assert {step.technique for step in steps} == {"checkpointing", "optimizer_fusion"}
    for step in steps:
        assert isinstance(step.on_top, Effect)
        assert step.on_top.speed_share is not None
        assert step.on_top.saved_bytes is not None
        assert not step.on_top.is_predicted
