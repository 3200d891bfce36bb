import math
import statistics
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autotune.analysis.confirmed_speed import on_one_scale
from autotune.analysis.front import pareto_front
from autotune.analysis.pick import PREFERENCES, Preferences, choose
from autotune.analysis.tolerance import Tolerance, perplexity_spread
from autotune.errors import InvalidInput
from autotune.spec.config import TrainingConfig
from autotune.spec.result import Outcome, SpeedAlone
from tests.building.results import OVER_RANDOM, mean_of, out_of_memory, record, shared_with

TOLERANCE = Tolerance(speed=0.03, perplexity=0.005)

OBJECTIVES = st.tuples(
    st.integers(1, 12),
    st.integers(900, 1100).map(float),
    st.integers(970, 1030).map(lambda p: p / 100),
)


def front(*objectives, tolerance=TOLERANCE):
    return set(pareto_front(records(objectives), tolerance=tolerance))


def records(objectives):
    return [record(n, memory=m, speed=s, perplexity=p) for n, (m, s, p) in enumerate(objectives)]


def dominates(one, other, tolerance=TOLERANCE):
    """Worse on no objective by more than its tolerance, and better on one by more than it."""
    worse = (
        one[0] > other[0]
        or one[1] < other[1] * (1 - tolerance.speed)
        or one[2] > other[2] * (1 + tolerance.perplexity)
    )
    better = (
        one[0] < other[0]
        or one[1] > other[1] * (1 + tolerance.speed)
        or one[2] < other[2] * (1 - tolerance.perplexity)
    )
    return better and not worse


def is_equal(one, other):
    """Neither is worse than the other by more than the tolerance; memory has none."""
    return (
        one[0] == other[0]
        and min(one[1], other[1]) >= max(one[1], other[1]) * (1 - TOLERANCE.speed)
        and max(one[2], other[2]) <= min(one[2], other[2]) * (1 + TOLERANCE.perplexity)
    )


def confirmed(number, *, alone=1000.0, **fields):
    """Returns a trial that was confirmed, of which the trial itself was as fast as `alone`."""
    speed = SpeedAlone(tokens_per_second=alone, spread=None, error=0.08)
    return record(number, confirmations=3, alone=speed, **fields)


@st.composite
def drawn_trials(draw):
    """Returns a trial with or without noise, a perplexity that counts and a confirmation."""
    memory, speed, perplexity = draw(OBJECTIVES)
    fields = {"memory": draw(st.integers(1, min(3, memory))), "perplexity": perplexity}
    fields["perplexity_spread"] = draw(st.sampled_from([None, 0.02, 0.1]))
    if draw(st.booleans()):
        fields["perplexity_source"] = OVER_RANDOM
    if draw(st.booleans()):
        error = draw(st.sampled_from([0.005, 0.02]))
        alone = draw(st.sampled_from([speed, 3 * speed]))
        return confirmed(0, speed=speed, alone=alone, speed_error=error, **fields)
    return record(0, speed=speed, speed_error=draw(st.sampled_from([None, 0.08])), **fields)


TRIAL = drawn_trials()
TRIALS = st.lists(TRIAL, min_size=1, max_size=8)


def numbered(trials):
    return [replace(trial, number=number) for number, trial in enumerate(trials)]


def beats(one, other):
    """Returns whether a trial dominates another, each with its noise, by speeds of one scale."""
    one_noise, other_noise = one.perplexity_spread or 0.0, other.perplexity_spread or 0.0
    perplexity_noise = max(TOLERANCE.perplexity * other.perplexity, one_noise, other_noise)
    counts = not (one.perplexity_says_nothing or other.perplexity_says_nothing)
    speed, other_speed = on_one_scale(one, other)
    speed_noise = 2 * math.hypot(speed.speed_error or 0.0, other_speed.speed_error or 0.0)
    speed_noise = max(TOLERANCE.speed, speed_noise)
    slower_by = -speed_noise if other.confirmations > one.confirmations else speed_noise
    ratio = speed.tokens_per_second / other_speed.tokens_per_second
    is_worse = (
        one.peak_memory_bytes > other.peak_memory_bytes
        or ratio < 1 - slower_by
        or (counts and one.perplexity > other.perplexity + perplexity_noise)
    )
    is_better = (
        one.peak_memory_bytes < other.peak_memory_bytes
        or ratio > 1 + speed_noise
        or (counts and one.perplexity < other.perplexity - perplexity_noise)
    )
    return is_better and not is_worse


def all_above(trial, trials):
    """Returns the trials that dominate one directly or through others."""
    found = []
    remaining = [trial]
    while remaining:
        below = remaining.pop()
        new = [one for one in trials if one not in found and beats(one, below)]
        found += new
        remaining += new
    return found


def picked(trials, *, prefer="fastest"):
    asked = Preferences(prefer=prefer, tolerance=TOLERANCE)
    front = pareto_front(trials, tolerance=TOLERANCE)
    pick = choose(trials, front, baseline=None, preferences=asked)
    return next(trial for trial in trials if trial.number == pick.number)


# -- perplexities that say nothing -----------------------------------------------------------------


def test_a_perplexity_that_says_nothing_keeps_no_trial_on_the_front():
    better, slower = records([(1, 1000.0, 10.0), (2, 900.0, 1.0)])
    assert pareto_front([better, slower], tolerance=TOLERANCE) == (0, 1)
    says_nothing = replace(slower, perplexity_source=OVER_RANDOM)
    assert pareto_front([better, says_nothing], tolerance=TOLERANCE) == (0,)


def test_a_perplexity_that_says_nothing_removes_no_trial_from_the_front():
    low, high = records([(1, 900.0, 10.0), (2, 1100.0, 5.0)])
    says_nothing = replace(low, perplexity=1.0, perplexity_source=OVER_RANDOM)
    equal = replace(high, tokens_per_second=900.0, peak_memory_bytes=1)
    assert set(pareto_front([says_nothing, equal], tolerance=TOLERANCE)) == {0, 1}


# -- by hand ---------------------------------------------------------------------------------------


def test_no_trial_has_no_front():
    assert front() == set()


def test_one_trial_is_the_front():
    assert front((1, 1000.0, 10.0)) == {0}


def test_a_trial_that_is_worse_in_everything_is_not_on_it():
    assert front((1, 1000.0, 10.0), (2, 900.0, 11.0)) == {0}


def test_more_memory_for_more_speed_is_on_it():
    assert front((1, 1000.0, 10.0), (2, 1100.0, 10.0)) == {0, 1}


def test_a_perplexity_better_by_less_than_its_spread_over_seeds_is_not_better():
    far, near = (
        [
            record(0, memory=1, speed=1000.0, perplexity=10.0, perplexity_spread=spread),
            record(1, memory=2, speed=1000.0, perplexity=9.0, perplexity_spread=0.1),
        ]
        for spread in (0.5, 1.5)
    )
    assert pareto_front(far, tolerance=TOLERANCE) == (0, 1)
    assert pareto_front(near, tolerance=TOLERANCE) == (0,)


def test_more_memory_for_a_better_perplexity_is_on_it():
    assert front((1, 1000.0, 10.0), (2, 1000.0, 9.0)) == {0, 1}


def test_more_memory_for_an_improvement_within_the_noise_is_not_on_it():
    assert front((100, 1000.0, 10.0), (101, 1029.0, 9.96)) == {0}


def test_one_byte_is_a_difference():
    assert front((2**33, 1000.0, 10.0), (2**33 + 1, 1000.0, 10.0)) == {0}


def test_without_tolerances_the_smallest_improvement_counts():
    assert front(
        (100, 1000.0, 10.0), (101, 1000.1, 10.0), tolerance=Tolerance(speed=0, perplexity=0)
    ) == {0, 1}


def test_one_of_equal_trials_is_on_it():
    assert front((1, 1000.0, 10.0), (1, 1000.0, 10.0)) == {0}


def test_equal_trials_do_not_remove_each_other_in_a_chain():
    # Each is within the noise of the one before, the last is not within the noise of the first.
    assert front((1, 1000.0, 10.0), (1, 1025.0, 10.04), (1, 1050.0, 10.08)) == {0, 2}


def test_a_trial_dominated_by_one_that_is_dominated_itself_is_not_on_it():
    assert front((21, 1000.0, 20.0), (64, 1020.0, 20.0), (20, 975.0, 20.0)) == {2}


def test_of_equal_trials_the_confirmed_one_is_on_it():
    trials = [record(0), confirmed(1)]
    assert pareto_front(trials, tolerance=TOLERANCE) == (1,)


def test_of_trials_that_dominate_each_other_in_a_circle_one_is_on_it():
    # The first is a little slower than the second and has a better perplexity, the second than the
    # third; the last has a perplexity that says nothing, and is faster than the first.
    counting = records([(1, 1000.0, 9.0), (1, 1030.5, 9.1), (1, 1062.0, 9.2)])
    other = record(3, memory=1, speed=1030.8, perplexity_source=OVER_RANDOM)
    assert pareto_front([*counting, other], tolerance=TOLERANCE) == (0,)


def test_of_equal_memory_the_one_that_is_faster_beyond_the_noise_stays():
    assert front((1, 1000.0, 10.0), (1, 1100.0, 10.0)) == {1}


def test_of_equal_memory_and_speed_the_one_with_the_better_perplexity_stays():
    assert front((1, 1000.0, 10.0), (1, 1000.0, 11.0)) == {0}


def test_the_front_is_in_the_order_of_its_memory():
    trials = records([(3, 1200.0, 10.0), (1, 1000.0, 10.0), (2, 1100.0, 10.0)])
    assert pareto_front(trials, tolerance=TOLERANCE) == (1, 2, 0)


@pytest.mark.parametrize("outcome", get_args(Outcome)[1:])
def test_a_trial_that_is_not_ok_is_never_on_it(outcome):
    better = record(0, memory=1, speed=9e9, perplexity=1.0, outcome=outcome)
    assert pareto_front([better, record(1)], tolerance=TOLERANCE) == (1,)


def test_a_trial_over_the_cap_is_never_on_it_even_when_it_trained():
    baseline = record(0, memory=1, speed=9e9, perplexity=1.0, feasible=False)
    assert pareto_front([baseline, record(1)], tolerance=TOLERANCE) == (1,)


def test_a_trial_without_numbers_does_not_disturb_the_front():
    assert pareto_front([out_of_memory(0), record(1)], tolerance=TOLERANCE) == (1,)


@pytest.mark.parametrize("share", [-0.01, 1, 1.5, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["speed", "perplexity"])
def test_an_invalid_tolerance_is_rejected_by_name(name, share):
    with pytest.raises(InvalidInput, match=f"Invalid {name}: {share}"):
        Tolerance(**{name: share})


# -- whatever the trials ---------------------------------------------------------------------------


@given(st.lists(OBJECTIVES, min_size=1))
def test_no_trial_at_all_dominates_one_on_the_front(objectives):
    on_front = [objectives[number] for number in front(*objectives)]
    assert on_front
    assert not any(dominates(one, other) for one in objectives for other in on_front)


@given(st.lists(OBJECTIVES, min_size=1))
def test_a_trial_that_is_not_on_the_front_is_dominated_or_equal_to_one_on_it(objectives):
    on_front = front(*objectives)
    for number, other in enumerate(objectives):
        if number not in on_front:
            assert any(dominates(one, other) for one in objectives) or any(
                is_equal(objectives[one], other) for one in on_front
            )


@given(st.lists(OBJECTIVES, min_size=1))
def test_no_two_trials_on_the_front_are_equal(objectives):
    on_front = sorted(front(*objectives))
    assert not any(
        is_equal(objectives[one], objectives[other])
        for one in on_front
        for other in on_front
        if one != other
    )


@given(TRIALS)
def test_whatever_dominates_a_trial_on_the_front_is_in_a_circle_with_it(trials):
    """Noise, ties, perplexities that say nothing and confirmed speeds included."""
    trials = numbered(trials)
    on_front = pareto_front(trials, tolerance=TOLERANCE)
    assert on_front
    for number in on_front:
        for above in all_above(trials[number], trials):
            assert trials[number] in all_above(above, trials)


@given(TRIALS, TRIAL, st.sampled_from(PREFERENCES))
def test_a_further_trial_never_makes_the_pick_worse(trials, further, prefer):
    before = picked(numbered(trials), prefer=prefer)
    trials = numbered([*trials, further])
    after = picked(trials, prefer=prefer)
    assert not beats(before, after) or before in all_above(after, all_above(before, trials))


@given(st.lists(OBJECTIVES, min_size=1), OBJECTIVES)
def test_a_further_trial_slows_the_pick_down_by_noise_at_most(objectives, further):
    # All perplexities are the same, and no trial dominates the further one.
    before = [(memory, speed, 10.0) for memory, speed, _ in objectives]
    further = (*further[:2], 10.0)
    assume(not any(dominates(one, further) for one in before))
    old, new = (picked(records(trials)) for trials in (before, [*before, further]))
    assert new.tokens_per_second >= old.tokens_per_second * (1 - TOLERANCE.speed)


@given(st.lists(OBJECTIVES, min_size=1))
def test_a_front_without_tolerances_is_the_pareto_front(objectives):
    exact = Tolerance(speed=0, perplexity=0)
    undominated = {
        number
        for number, one in enumerate(objectives)
        if not any(dominates(o, one, exact) for o in objectives)
    }
    on_front = front(*objectives, tolerance=exact)
    assert on_front <= undominated
    assert {objectives[one] for one in on_front} == {objectives[one] for one in undominated}


@given(st.lists(OBJECTIVES, min_size=1), st.data())
def test_a_dominated_trial_more_changes_nothing(objectives, data):
    on_front = front(*objectives)
    memory, speed, perplexity = objectives[data.draw(st.sampled_from(sorted(on_front)))]
    worse = (memory + data.draw(st.integers(1, 5)), speed * 0.99, perplexity * 1.001)
    assert front(*objectives, worse) == on_front


@given(st.lists(OBJECTIVES), st.randoms())
def test_the_order_of_the_records_does_not_matter(objectives, draw):
    trials = records(objectives)
    shuffled = draw.sample(trials, len(trials))
    assert pareto_front(shuffled, tolerance=TOLERANCE) == pareto_front(trials, tolerance=TOLERANCE)


@given(st.lists(OBJECTIVES, min_size=1))
def test_the_least_memory_of_all_is_on_the_front(objectives):
    on_front = front(*objectives)
    assert min(objectives[number][0] for number in on_front) == min(
        memory for memory, _, _ in objectives
    )


# -- the noise of perplexity -----------------------------------------------------------------------


def test_without_trials_there_is_no_spread():
    assert perplexity_spread([]) == 0.0


def test_one_trial_of_a_class_has_no_spread():
    assert (
        perplexity_spread(
            [record(0), record(1, config=TrainingConfig(precision="tf32"), perplexity=20.0)]
        )
        == 0.0
    )


def test_the_spread_of_one_class_is_its_relative_standard_deviation():
    values = [10.0, 10.1, 10.4]
    trials = [record(number, perplexity=value) for number, value in enumerate(values)]
    assert perplexity_spread(trials) == pytest.approx(
        statistics.stdev(values) / statistics.fmean(values)
    )


def test_the_spread_is_within_classes_and_not_between_them():
    other = TrainingConfig(precision="bf16-true")
    trials = [
        record(0),
        record(1),
        record(2, config=other, perplexity=20.0),
        record(3, config=other, perplexity=20.0),
    ]
    assert perplexity_spread(trials) == 0.0


def test_a_trial_over_the_cap_counts_for_the_spread():
    assert perplexity_spread([record(0), record(1, outcome="over_cap", perplexity=11.0)]) > 0


@pytest.mark.parametrize("outcome", ["diverged", "crashed", "timeout"])
def test_a_trial_that_did_not_end_well_does_not_count_for_the_spread(outcome):
    assert (
        perplexity_spread(
            [record(0), record(1, outcome=outcome, perplexity=99.0), out_of_memory(2)]
        )
        == 0.0
    )


def test_shared_perplexities_say_nothing_of_the_spread_and_seeds_do():
    shared = [
        record(0, perplexity=10.0, perplexity_source=mean_of(3), perplexity_spread=0.2),
        record(1, perplexity=10.0, perplexity_source=shared_with(0), perplexity_spread=0.2),
    ]
    assert perplexity_spread(shared) == pytest.approx(0.02)


# -- speeds with known errors ----------------------------------------------------------------------


def front_with_errors(smaller, faster):
    """Returns the front of a smaller trial and a faster one, each with its speed and its error."""
    return pareto_front(
        [
            record(0, memory=1, speed=smaller[0], speed_error=smaller[1]),
            record(1, memory=2, speed=faster[0], speed_error=faster[1]),
        ],
        tolerance=TOLERANCE,
    )


def test_a_difference_in_speed_within_two_errors_is_none():
    assert front_with_errors((1000.0, 0.09), (1200.0, 0.09)) == (0,)


def test_the_same_difference_counts_once_it_is_confirmed():
    assert front_with_errors((1000.0, 0.02), (1200.0, 0.02)) == (0, 1)


def test_however_small_the_errors_are_a_difference_within_the_tolerance_is_none():
    assert front_with_errors((1000.0, 0.001), (1025.0, 0.001)) == (0,)


def test_a_trial_that_is_more_than_twice_as_fast_is_faster_whatever_the_errors_are():
    assert front_with_errors((1000.0, 3.0), (2500.0, 3.0)) == (0, 1)
