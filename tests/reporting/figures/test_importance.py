"""Importance of techniques, on trials made so that the answer is known."""

import dataclasses
import itertools
import math
import random
import statistics
from typing import Any

import pytest

from autotune.errors import InvalidInput
from autotune.reporting.figures.importance import FEWEST_TRIALS, compute, draw
from autotune.spec.config import TrainingConfig
from tests.building.results import OVER_RANDOM, record
from tests.building.views import ladder_view, many_trials

EFFECTS: dict[str, dict[Any, float]] = {
    "precision": {"fp32": 0.0, "bf16-mixed": 0.0, "bf16-true": 0.5},
    "checkpointing": {"none": 0.0, "selective": 0.2, "every-2": 0.3, "block": 0.4},
    "micro_batch_size": {1: 0.0, 2: 0.1, 4: 0.2, 8: 0.4},
}
"""What each value adds to the logarithm of the memory."""


def trials_of_effects(*, seed=None, count=48):
    """Returns trials whose memory is that of `EFFECTS`: all combinations, or some of them."""
    combinations = list(itertools.product(*EFFECTS.values()))
    if seed is not None:
        combinations = random.Random(seed).sample(combinations, count)
    found = []
    for number, values in enumerate(combinations):
        choices = dict(zip(EFFECTS, values, strict=True))
        logarithm = sum(EFFECTS[field][value] for field, value in choices.items())
        memory = round(1e12 * math.exp(logarithm))
        found.append(record(number, config=TrainingConfig(**choices), memory=memory))
    return found


@pytest.fixture(scope="module")
def figure():
    return compute(ladder_view(many_trials()))


@pytest.mark.parametrize(
    ("objective", "decides"),
    [(0, "checkpointing"), (1, "micro_batch_size"), (2, "precision")],
    ids=str,
)
def test_what_decides_an_objective_has_the_largest_share(objective, decides, figure):
    shares = figure.objectives[objective].shares
    assert shares[decides] > 0.9


def test_what_techniques_decide_alone_adds_up_to_no_more_than_all(figure):
    assert all(0.9 < sum(one.shares.values()) < 1.0001 for one in figure.objectives)


def test_what_only_two_techniques_together_decide_is_the_share_of_neither():
    trials = [
        dataclasses.replace(
            trial,
            perplexity=20.0
            if (trial.config.precision == "fp32") == (trial.config.loss == "full")
            else 30.0,
        )
        for trial in many_trials()
    ]
    figure = compute(ladder_view(trials))
    assert sum(figure.objectives[2].shares.values()) < 0.5
    assert "the interaction of techniques" in figure.note


@pytest.mark.parametrize("seed", [None, *range(8)])
def test_effects_that_add_up_have_their_exact_shares_however_few_trials_there_are(seed):
    memory, *_ = compute(ladder_view(trials_of_effects(seed=seed, count=24))).objectives
    variances = {field: statistics.pvariance(list(of.values())) for field, of in EFFECTS.items()}
    whole = sum(variances.values())
    right = {field: variance / whole for field, variance in variances.items()}
    assert memory.shares == pytest.approx(right, abs=1e-9)


def test_noise_makes_no_technique_important():
    noise = random.Random(1)
    shares = []
    for _ in range(20):
        trials = [
            dataclasses.replace(trial, tokens_per_second=1000.0 * math.exp(noise.gauss(0.0, 0.1)))
            for trial in trials_of_effects()
        ]
        _, speed, _ = compute(ladder_view(trials)).objectives
        shares.append(sum(speed.shares.values()))
    assert statistics.fmean(shares) < 0.1


def test_more_values_than_trials_are_rejected():
    trials = [
        dataclasses.replace(trial, config=dataclasses.replace(trial.config, micro_batch_size=1 + n))
        for n, trial in enumerate(trials_of_effects(seed=0, count=FEWEST_TRIALS))
    ]
    with pytest.raises(InvalidInput, match="importance needs more trials") as caught:
        compute(ladder_view(trials))
    assert "autotune search --name study" in caught.value.hint


def test_a_perplexity_that_says_nothing_decides_nothing():
    trials = many_trials()
    for other in (1e-3, 1e3):
        nothing = dataclasses.replace(trials[1], perplexity=other, perplexity_source=OVER_RANDOM)
        *_, perplexity = compute(ladder_view([*trials, nothing])).objectives
        assert perplexity.shares == pytest.approx(compute(ladder_view(trials)).objectives[2].shares)


def test_a_technique_of_one_value_has_no_share(figure):
    assert set(figure.techniques) == {"checkpointing", "micro_batch_size", "precision", "loss"}


def test_the_note_names_the_method_and_the_number_of_trials(figure):
    assert "analysis of variance" in figure.note
    assert "32 for memory" in figure.note


def test_the_same_study_has_the_same_importances(figure):
    assert compute(ladder_view(many_trials())).objectives == figure.objectives


def test_an_objective_that_is_the_same_in_all_trials_is_said_to_be():
    trials = [dataclasses.replace(trial, perplexity=20.0) for trial in many_trials()]
    figure = compute(ladder_view(trials))
    assert figure.objectives[2].shares == {}
    assert "All trials have the same perplexity." in figure.note


def test_too_few_trials_are_rejected_with_how_many_are_needed():
    with pytest.raises(
        InvalidInput, match=f"at least {FEWEST_TRIALS} trials with a measured memory"
    ) as caught:
        compute(ladder_view(many_trials()[: FEWEST_TRIALS - 1]))
    assert "autotune search --name study" in caught.value.hint


def test_trials_that_differ_in_nothing_are_rejected():
    one = many_trials()[3]
    same = [dataclasses.replace(one, number=number) for number in range(FEWEST_TRIALS)]
    with pytest.raises(InvalidInput, match="the same choices or the same results"):
        compute(ladder_view(same))


def test_each_technique_has_a_bar_for_each_objective(figure):
    drawing = draw(figure)
    assert [trace.name for trace in drawing.data] == ["memory", "speed", "perplexity"]
    assert all(len(trace.x) == len(figure.techniques) for trace in drawing.data)
