"""Parallel coordinates of what trials chose and came to."""

import pytest

from autotune.errors import InvalidInput
from autotune.reporting.figures.parallel import MOST_LINES, compute, draw
from tests.building.results import record
from tests.building.views import config, failures_only, ladder_view, many_trials


def test_only_techniques_that_differ_are_axes():
    assert [axis.title for axis in compute(ladder_view()).techniques] == [
        "precision",
        "checkpointing",
    ]


def test_a_trial_crosses_an_axis_at_its_own_value():
    checkpointing = compute(ladder_view()).techniques[1]
    assert [checkpointing.ticks[int(place)] for place in checkpointing.values] == [
        "none",
        "block",
        "none",
        "block",
    ]


def test_only_feasible_trials_on_request():
    assert compute(ladder_view()).numbers == (0, 1, 2, 3)
    assert compute(ladder_view(), feasible_only=True).numbers == (1, 2, 3)


def test_the_lines_have_the_objectives_and_the_colour_of_speed():
    (lines,) = draw(compute(ladder_view())).data
    assert [dimension.label for dimension in lines.dimensions][-3:] == [
        "peak memory, MiB",
        "perplexity",
        "tokens per second",
    ]
    assert lines.dimensions[-1].values == lines.line.color == (1000.0, 800.0, 1500.0, 1200.0)


def test_the_note_says_what_all_trials_have_in_common():
    assert "The same in all: optimizer, micro batch size, compile" in compute(ladder_view()).note


def test_the_longest_value_of_the_first_axis_has_room():
    trials = [
        *many_trials(2),
        record(2, config=config(precision="bf16-stochastic")),
    ]
    assert draw(compute(ladder_view(trials, front=(), pick=None))).layout.margin.l > 7 * len(
        "bf16-stochastic"
    )


def test_a_phone_scrolls_the_figure_instead_of_squeezing_it():
    assert draw(compute(ladder_view())).layout.meta["least_width"] > 600


def test_of_a_large_study_evenly_spaced_trials_and_the_front_are_shown():
    figure = compute(ladder_view(many_trials(3 * MOST_LINES), front=(1, 3), pick=None))
    assert len(figure.numbers) == MOST_LINES + 1
    assert {0, 1, 3, 6} <= set(figure.numbers)
    assert f"evenly spaced ones of {3 * MOST_LINES} and the front" in figure.note


@pytest.mark.parametrize("feasible_only", [True, False])
def test_without_a_trial_to_show_there_is_one_sentence(feasible_only):
    with pytest.raises(InvalidInput, match="study 'all failed'"):
        compute(failures_only(), feasible_only=feasible_only)
