"""Ablation over hand-made records: each technique alone, on top of others, and over all pairs."""

import dataclasses

import pytest

from autotune.analysis.ablation import Effect, ablation_steps
from autotune.spec.config import LegalityContext, reverted
from tests.building.results import MIB, out_of_memory, record
from tests.building.views import BASELINE, BF16, BLOCK, BOTH, config, four_trials


def rungs(trials=None, *, pick=3, peaks=None):
    trials = four_trials() if trials is None else trials
    picked = next((trial for trial in trials if trial.number == pick), None)
    found = ablation_steps(
        trials,
        plain=BASELINE,
        pick=picked,
        at=LegalityContext(global_batch=BASELINE.micro_batch_size),
        predicted_peak=lambda config: (peaks or {}).get(config),
    )
    return {(rung.technique, rung.value): rung for rung in found}


def test_there_is_a_step_for_every_value_that_was_tried_and_is_not_the_baselines():
    assert list(rungs()) == [("precision", "bf16-mixed"), ("checkpointing", "block")]


def test_alone_is_the_baseline_against_the_trial_with_only_this():
    effect = rungs()["checkpointing", "block"].alone
    assert (effect.with_number, effect.without_number) == (1, 0)
    assert (effect.saved_bytes, effect.saved_share) == (200 * MIB, 0.5)
    assert effect.speed_share == pytest.approx(-0.2)
    assert effect.perplexity_share == 0.0
    assert not effect.is_predicted


def test_on_top_is_the_pick_against_the_trial_without_only_this():
    effect = rungs()["checkpointing", "block"].on_top
    assert (effect.with_number, effect.without_number) == (3, 2)
    assert (effect.saved_bytes, effect.saved_share) == (150 * MIB, 0.6)
    assert effect.speed_share == pytest.approx(-0.2)


def test_pairs_are_all_that_differ_in_this_only():
    pairs = rungs()["checkpointing", "block"].pairs
    assert pairs.count == 2
    assert (pairs.saved_share.lowest, pairs.saved_share.median, pairs.saved_share.highest) == (
        0.5,
        0.55,
        0.6,
    )


def test_a_trial_that_differs_in_two_techniques_is_in_no_pair():
    only = [trial for trial in four_trials() if trial.config in (BASELINE, BOTH)]
    assert [rung.pairs.count for rung in rungs(only).values()] == [0, 0]


def test_the_spread_of_a_speed_is_that_of_both_sides():
    slow, fast = four_trials()[0], four_trials()[2]
    trials = [
        dataclasses.replace(slow, tokens_per_second_spread=30.0),  # 3 % of 1000
        dataclasses.replace(fast, tokens_per_second_spread=60.0),  # 4 % of 1500
    ]
    effect = rungs(trials, pick=2)["precision", "bf16-mixed"].alone
    assert effect.speed_share == pytest.approx(0.5)
    assert effect.speed_spread == pytest.approx(1.5 * 0.05)


def test_a_speed_without_a_spread_has_none():
    assert rungs()["precision", "bf16-mixed"].alone.speed_spread is None


def test_memory_that_was_not_measured_on_both_sides_is_predicted_on_both():
    trials = [dataclasses.replace(four_trials()[0], peak_memory_bytes=None), four_trials()[1]]
    effect = rungs(trials, peaks={BASELINE: 800 * MIB, BLOCK: 200 * MIB})[
        "checkpointing", "block"
    ].alone
    assert (effect.saved_bytes, effect.is_predicted) == (600 * MIB, True)


def test_one_measured_and_one_predicted_peak_are_not_compared():
    trials = [dataclasses.replace(four_trials()[0], peak_memory_bytes=None), four_trials()[1]]
    effect = rungs(trials, peaks={BASELINE: 800 * MIB})["checkpointing", "block"].alone
    assert effect.saved_bytes is None
    assert effect.speed_share == pytest.approx(-0.2)


def test_what_is_neither_measured_nor_predicted_was_not_tried():
    trials = [four_trials()[0], four_trials()[3]]
    assert [(rung.alone, rung.on_top) for rung in rungs(trials).values()] == [
        ("not tried", "not tried")
    ] * 2


def test_what_was_tried_and_gave_no_number_has_failed():
    trials = [four_trials()[0], out_of_memory(1, config=BLOCK)]
    assert rungs(trials)["checkpointing", "block"].alone == "failed"


@pytest.mark.parametrize(
    "baseline", [[], [out_of_memory(0, config=BASELINE)]], ids=["not tried", "failed"]
)
def test_what_was_measured_where_the_baseline_was_not_has_not_failed(baseline):
    trials = [*baseline, *four_trials()[1:]]
    assert {rung.alone for rung in rungs(trials).values()} == {"baseline not known"}


def test_a_memory_budget_is_not_possible_alone():
    steered = record(1, config=config(compile="block", memory_budget=0.5))
    assert rungs([four_trials()[0], steered])["memory_budget", 0.5].alone == "not possible"


def test_a_value_the_pick_has_not_is_not_on_top():
    assert rungs(pick=1)["precision", "bf16-mixed"].on_top == "not in the pick"


def test_without_a_pick_nothing_is_on_top():
    assert {rung.on_top for rung in rungs(pick=None).values()} == {"no pick"}


def test_taking_the_compilation_out_takes_its_budget_along():
    assert (
        reverted(config(compile="block", memory_budget=0.5), "compile", plain=BASELINE) == BASELINE
    )


def test_a_baseline_that_was_only_predicted_still_gives_the_memory():
    peaks = {BASELINE: 400 * MIB, BF16: 250 * MIB}
    trials = [record(2, memory=250 * MIB, config=BF16)]
    effect = rungs(trials, pick=2, peaks=peaks)["precision", "bf16-mixed"].alone
    assert isinstance(effect, Effect)
    assert (effect.without_number, effect.saved_bytes, effect.is_predicted) == (
        None,
        150 * MIB,
        True,
    )
