"""Progress of a search: best so far, and hypervolumes that can be computed by hand."""

import dataclasses

import pytest

from autotune.errors import InvalidInput
from autotune.reporting.figures.history import compute, draw, hypervolumes
from autotune.spec.result import SpeedAlone
from tests.building.results import MIB, OVER_RANDOM, out_of_memory, record, study_result
from tests.building.views import failures_only, ladder_view, study_view

REFERENCE = (200.0 * MIB, 1 / 100, 20.0)


def at(number, *, memory, slowness, perplexity):
    """A feasible trial at these shares of the reference."""
    return record(
        number, memory=round(memory * 200 * MIB), speed=100 / slowness, perplexity=20.0 * perplexity
    )


def test_the_volume_of_one_trial_is_that_of_its_box():
    assert hypervolumes(
        [at(0, memory=0.5, slowness=0.5, perplexity=0.5)], REFERENCE
    ) == pytest.approx((0.125,))


def test_what_two_trials_share_counts_once():
    trials = [
        at(0, memory=0.5, slowness=0.25, perplexity=0.5),
        at(1, memory=0.25, slowness=0.5, perplexity=0.5),
    ]
    # 0.5 x 0.75 x 0.5 each; they share 0.5 x 0.5 x 0.5.
    assert hypervolumes(trials, REFERENCE) == pytest.approx((0.1875, 0.25))


def test_three_trials_have_the_volume_of_their_union():
    trials = [
        at(0, memory=0.0001, slowness=0.5, perplexity=0.5),
        at(1, memory=0.5, slowness=0.0001, perplexity=0.5),
        at(2, memory=0.5, slowness=0.5, perplexity=0.0001),
    ]
    # Three boxes of a quarter share the corner of an eighth: 3/4 - 3/8 + 1/8.
    assert hypervolumes(trials, REFERENCE)[-1] == pytest.approx(0.5, abs=1e-3)


def test_a_dominated_trial_and_one_that_is_not_feasible_add_nothing():
    first = at(0, memory=0.5, slowness=0.5, perplexity=0.5)
    over = record(2, memory=1, speed=1e9, perplexity=1.0, outcome="over_cap")
    trials = [first, at(1, memory=0.6, slowness=0.6, perplexity=0.6), over]
    assert hypervolumes(trials, REFERENCE) == pytest.approx((0.125,) * 3)


@pytest.mark.parametrize("perplexity", [1.0, 15.0, 900.0])
def test_a_perplexity_that_says_nothing_changes_no_course(perplexity):
    trials = [
        record(0, memory=100 * MIB, speed=1000.0, perplexity=20.0, seconds=1.0),
        record(1, memory=50 * MIB, perplexity_source=OVER_RANDOM, perplexity=20.0, seconds=1.0),
    ]
    other = [trials[0], dataclasses.replace(trials[1], perplexity=perplexity)]
    figures = [compute(study_view(study_result(records))) for records in (trials, other)]
    assert figures[0] == figures[1]


def test_a_course_has_the_speeds_of_the_trials_themselves():
    alone = SpeedAlone(tokens_per_second=3000.0, spread=None, error=0.1)
    confirmed = record(0, speed=200.0, confirmations=3, alone=alone)
    figure = compute(study_view(study_result([confirmed, record(1, speed=1000.0)])))
    assert figure.courses[1].values == (3000.0, 3000.0)


def test_before_the_first_feasible_trial_there_is_no_best_and_no_volume():
    figure = compute(study_view(study_result([out_of_memory(0), record(1, memory=100 * MIB)])))
    assert [course.values[0] for course in figure.courses] == [None, None, None, 0.0]


def test_the_best_so_far_is_of_feasible_trials_only():
    memory, speed, perplexity, _ = (course.values for course in compute(ladder_view()).courses)
    assert memory == (None, 200.0, 200.0, 100.0)
    assert speed == (None, 800.0, 1500.0, 1500.0)
    assert perplexity == (None, 20.0, 20.0, 20.0)


def test_time_is_that_of_the_trials_one_after_the_other():
    figure = compute(ladder_view())
    assert (figure.time_unit, [60 * moment for moment in figure.moments]) == (
        "minutes",
        [10.0, 30.0, 60.0, 100.0],
    )


def test_the_note_states_the_reference():
    note = compute(ladder_view()).note
    assert all(
        words in note
        for words in ("256.0 MiB (the cap)", "727 tokens/s", "perplexity 23.1 (10 % beyond the")
    )


@pytest.mark.parametrize("number", [1, 3])
def test_a_study_of_one_perplexity_has_a_volume(number):
    records = [
        record(place, memory=100 * MIB, speed=1000.0 + place, perplexity=20.0)
        for place in range(number)
    ]
    volumes = compute(study_view(study_result(records))).courses[-1].values
    assert all(volume > 0 for volume in volumes)


def test_each_quantity_is_drawn_over_trials_and_over_time():
    drawing = draw(compute(ladder_view()))
    assert [trace.name for trace in drawing.data][::2] == [trace.name for trace in drawing.data][
        1::2
    ]
    assert drawing.data[0].x == (0, 1, 3)
    assert drawing.data[0].y == drawing.data[1].y == (None, 200.0, 100.0)


def test_a_quantity_that_stays_as_it_is_is_not_magnified():
    axes = draw(compute(study_view(study_result([record(0), record(1)])))).layout
    assert [axes[name].rangemode for name in ("yaxis", "yaxis3", "yaxis7")] == ["tozero"] * 3


def test_a_line_is_drawn_by_its_corners_and_ends():
    records = [
        record(number, memory=(100 if number < 500 else 50) * MIB, speed=1000.0)
        for number in range(1000)
    ]
    line = draw(compute(study_view(study_result(records)))).data[0]
    assert (line.x, line.y) == ((0, 500, 999), (100.0, 50.0, 50.0))


def test_without_a_feasible_trial_there_is_one_sentence():
    with pytest.raises(
        InvalidInput, match="none of the 2 trials of study 'all failed' is feasible"
    ):
        compute(failures_only())
