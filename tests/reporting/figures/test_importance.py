"""Importance of techniques, on trials made so that the answer is known."""

import dataclasses

import pytest

from autotune.errors import InvalidInput
from autotune.reporting.figures.importance import FEWEST_TRIALS, MOST_TRIALS, compute, draw
from tests.building.views import ladder_view, many_trials


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


def test_a_technique_of_one_value_has_no_share(figure):
    assert set(figure.techniques) == {"checkpointing", "micro_batch_size", "precision", "loss"}


def test_the_note_names_the_evaluator_and_the_number_of_trials(figure):
    assert "fANOVA" in figure.note
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


def test_of_very_many_trials_evenly_spaced_ones_are_used():
    figure = compute(ladder_view(many_trials(MOST_TRIALS + 24)))
    assert [one.trials for one in figure.objectives] == [(MOST_TRIALS + 24) // 2] * 3


def test_each_technique_has_a_bar_for_each_objective(figure):
    drawing = draw(figure)
    assert [trace.name for trace in drawing.data] == ["memory", "speed", "perplexity"]
    assert all(len(trace.x) == len(figure.techniques) for trace in drawing.data)
