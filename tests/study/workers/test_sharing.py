"""One full training represents all that compute the same numbers; others measure the rest."""

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

import autotune
from autotune.spec.config import TrainingConfig
from autotune.spec.provenance import MEASURED
from autotune.spec.result import Measurement, bits_per_byte_at
from autotune.study.running.trial_runner import possible_representatives
from tests.building.results import mean_of, record, shared_with

SPACE = """
[techniques]
precision = ["fp32", "bf16-mixed"]
checkpointing = ["none", "block"]

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
TRAINED = {"perplexity_source": MEASURED, "parity": "same"}
CHECKPOINTED = TrainingConfig(checkpointing="block")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, one_trial_server):
    before = os.getcwd()
    folder = tmp_path_factory.mktemp("sharing")
    os.chdir(folder)
    Path("four.toml").write_text(SPACE)
    yield folder
    os.chdir(before)


def search(name, **options):
    return autotune.search(
        name=name,
        space="four.toml",
        max_mem="1GiB",
        trials=4,
        sampler="grid",
        confirm=False,
        **options,
    )


@pytest.fixture(scope="module")
def shared(folder):
    return search("shared", perplexity_seeds=3)


@pytest.fixture(scope="module")
def full(folder):
    return search("full", full_trainings=True, perplexity_seeds=2, fresh=True)


def by_config(result):
    return {trial.config: trial for trial in result.trials}


@pytest.mark.slow
def test_one_trial_of_each_numerics_class_is_trained_for_perplexity(shared):
    measured = [one for one in shared.trials if one.perplexity_source.kind == "measured"]
    assert sorted(one.config.precision for one in measured) == ["bf16-mixed", "fp32"]


def test_a_shared_perplexity_says_whose_it_is(shared):
    by_number = {trial.number: trial for trial in shared.trials}
    for trial in shared.trials:
        if trial.shares_perplexity:
            other = by_number[trial.perplexity_source.trial.number]
            assert trial.perplexity == other.perplexity
            assert trial.config.numerics_class == other.config.numerics_class


@pytest.mark.slow
def test_what_is_shared_is_what_a_full_training_gives(shared, full):
    for config, trial in by_config(full).items():
        # The mean of three seeds lies within a few of their spreads of the first.
        other = by_config(shared)[config]
        assert abs(trial.perplexity - other.perplexity) < 4 * other.perplexity_spread


def test_a_shared_trial_has_the_peak_memory_of_a_full_training(shared, full):
    peaks = {config: trial.peak_memory_bytes for config, trial in by_config(full).items()}
    assert {config: trial.peak_memory_bytes for config, trial in by_config(shared).items()} == peaks


def test_full_trainings_measure_every_perplexity_with_all_seeds(full):
    """The perplexity of one seed says nothing against the mean of several."""
    assert {trial.perplexity_source for trial in full.trials} == {mean_of(2)}


def test_seeds_give_a_perplexity_its_spread(shared):
    assert all(trial.perplexity_spread > 0 for trial in shared.trials)
    assert any(trial.perplexity_source == mean_of(3) for trial in shared.trials)


def test_every_trial_was_held_against_a_plain_training(shared):
    assert {trial.parity for trial in shared.trials} == {"same"}


def test_another_precision_is_represented_by_none_of_ours():
    known = [record(0, config=TrainingConfig(precision="bf16-mixed"), **TRAINED)]
    assert possible_representatives(CHECKPOINTED, known, steps=30) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"perplexity_source": shared_with(3)},
        {"parity": "not compared"},
        {"perplexity": None},
    ],
    ids=["shared itself", "not compared", "not measured"],
)
def test_a_trial_without_a_measured_and_compared_perplexity_represents_no_others(changes):
    assert (
        possible_representatives(CHECKPOINTED, [record(0, **{**TRAINED, **changes})], steps=30)
        == []
    )


def test_the_baseline_represents_its_class_also_over_the_cap():
    baseline = replace(record(0, outcome="over_cap", **TRAINED), feasible=False)
    assert possible_representatives(CHECKPOINTED, [baseline], steps=30) == [baseline]


def test_bits_a_byte_follow_the_mean_perplexity_of_the_seeds():
    first = Measurement(outcome="ok", perplexity=math.exp(2.0), bits_per_byte=3.0)
    assert bits_per_byte_at(math.exp(4.0), first) == pytest.approx(6.0)


def test_a_model_that_knows_the_text_by_heart_has_bits_a_byte_with_several_seeds():
    """Its loss is rounding, and its perplexity 1: a division by its logarithm ended the search."""
    first = Measurement(outcome="ok", perplexity=1.0, bits_per_byte=1e-17)
    assert bits_per_byte_at(1.0, first) == 1e-17
