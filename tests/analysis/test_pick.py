from dataclasses import replace

import pytest

from autotune.analysis.front import pareto_front
from autotune.analysis.pick import (
    PREFERENCES,
    Preferences,
    check_preferences,
    choose,
    closest_miss,
    savings,
)
from autotune.analysis.tolerance import Tolerance
from autotune.errors import InvalidInput
from autotune.spec.config import TrainingConfig
from autotune.spec.workload import make_workload
from tests.analysis.test_expected_step import expected
from tests.building.results import MIB, OVER_RANDOM, out_of_memory, record

SMALL = record(0, memory=100 * MIB, speed=1000.0, perplexity=10.0)
MIDDLE = record(1, memory=120 * MIB, speed=1900.0, perplexity=10.02)
FAST = record(2, memory=300 * MIB, speed=2000.0, perplexity=10.05)
UNSURE = record(
    3, memory=90 * MIB, speed=3000.0, perplexity=11.0, config=TrainingConfig(precision="bf16-true")
)
ALL = (SMALL, MIDDLE, FAST, UNSURE)
EVERY_PREFERENCE = pytest.mark.parametrize("prefer", PREFERENCES)


def pick(trials=ALL, *, baseline=None, **preferences):
    asked = Preferences(**preferences)
    front = pareto_front(trials, tolerance=asked.tolerance)
    return choose(trials, front, baseline=baseline, preferences=asked)


# -- which -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefer", "number"), [("fastest", 2), ("smallest", 0), ("balanced", 1)])
def test_a_preference_has_its_pick(prefer, number):
    assert pick(prefer=prefer).number == number


def test_the_fastest_is_preferred_by_default():
    assert pick() == pick(prefer="fastest")


@EVERY_PREFERENCE
def test_an_empty_front_has_no_pick(prefer):
    assert pick([out_of_memory(0)], prefer=prefer) is None


@EVERY_PREFERENCE
def test_a_single_feasible_trial_is_the_pick(prefer):
    assert pick([out_of_memory(0), record(7)], prefer=prefer).number == 7


@EVERY_PREFERENCE
def test_only_a_trial_of_the_front_is_picked(prefer):
    asked = Preferences(prefer=prefer)
    assert choose(ALL, [MIDDLE.number], baseline=None, preferences=asked).number == MIDDLE.number


@EVERY_PREFERENCE
def test_the_order_of_the_records_does_not_change_the_pick(prefer):
    assert pick(ALL[::-1], prefer=prefer) == pick(ALL, prefer=prefer)


@EVERY_PREFERENCE
def test_of_equals_the_first_is_picked(prefer):
    assert pick([record(5), record(4)], prefer=prefer).number == 4


# -- perplexity ------------------------------------------------------------------------------------


@EVERY_PREFERENCE
def test_a_trial_with_too_high_a_perplexity_is_not_picked(prefer):
    assert pick(prefer=prefer).number != UNSURE.number


@EVERY_PREFERENCE
def test_a_larger_allowance_lets_it_in(prefer):
    assert pick(prefer=prefer, max_perplexity_increase=0.11).number == UNSURE.number


def test_an_allowance_of_nothing_leaves_only_the_best_perplexity():
    unlike = TrainingConfig(precision="tf32")
    trials = [record(0), record(1, memory=200 * MIB, speed=2000.0, perplexity=10.01, config=unlike)]
    assert pick(trials, max_perplexity_increase=0.0).number == 0


def test_a_spread_larger_than_the_allowance_takes_its_place():
    noisy = TrainingConfig(precision="tf32")
    trials = [
        record(0, memory=100 * MIB, perplexity=10.0),
        record(1, memory=200 * MIB, speed=2000.0, perplexity=10.3),
        record(2, memory=900 * MIB, speed=500.0, perplexity=9.7, outcome="over_cap", config=noisy),
        record(3, memory=900 * MIB, speed=500.0, perplexity=10.5, outcome="over_cap", config=noisy),
    ]
    assert pick(trials, max_perplexity_increase=0.01).number == 1


LORA = TrainingConfig(adapter="lora")
RANDOM = replace(FAST, config=LORA, perplexity=1.0, perplexity_source=OVER_RANDOM)


@EVERY_PREFERENCE
def test_a_perplexity_over_random_weights_rules_no_other_trial_out(prefer):
    front = [SMALL.number, RANDOM.number]
    picked = choose([SMALL, RANDOM], front, baseline=None, preferences=Preferences(prefer=prefer))
    assert "of the best, 10;" in picked.reason
    assert "compared in memory and speed only" in picked.warning


def test_a_high_perplexity_over_random_weights_does_not_keep_a_trial_from_being_picked():
    assert pick([SMALL, replace(RANDOM, perplexity=300.0)]).number == RANDOM.number


def test_where_no_perplexity_counts_the_reason_names_none():
    assert pick([RANDOM]).criterion == "the fastest on the front"


@pytest.mark.parametrize("share", [-0.01, 100, float("nan"), float("inf")])
def test_an_invalid_perplexity_increase_is_rejected(share):
    with pytest.raises(InvalidInput, match=f"Invalid max_perplexity_increase: {share}"):
        Preferences(max_perplexity_increase=share)


def test_an_invalid_preference_is_rejected_with_a_list_of_the_valid_ones():
    with pytest.raises(InvalidInput, match="'cheapest'") as refused:
        Preferences(prefer="cheapest")
    assert all(prefer in refused.value.hint for prefer in PREFERENCES)


# -- before training and learning rates ------------------------------------------------------------

FINE_TUNED = replace(
    make_workload("cpu"), learning_rates={"adamw": 2e-5, "sgd": 1e-3, "lora/adamw": 3e-4}
)


def reasons(*trials, initial_perplexity=None):
    return choose(
        trials,
        [trial.number for trial in trials],
        baseline=None,
        preferences=Preferences(),
        workload=FINE_TUNED,
        initial_perplexity=initial_perplexity,
    )


@pytest.mark.parametrize("initial", [10.0, 9.0])
def test_a_pick_that_training_did_not_improve_comes_with_its_learning_rate(initial):
    words = f"a learning rate of 2e-05 (adamw) made it worse: its perplexity was {initial:g} before"
    picked = reasons(SMALL, initial_perplexity=initial)
    assert words in picked.doubt
    assert picked.reason.startswith(picked.doubt)
    assert picked.heading == "Pick, not to be trusted"


@pytest.mark.parametrize("initial", [10.1, None])
def test_a_pick_that_training_improved_comes_without_a_warning(initial):
    picked = reasons(SMALL, initial_perplexity=initial)
    assert (picked.warning, picked.doubt, picked.heading) == ("", "", "Pick")


def test_a_pick_across_kinds_of_training_names_the_learning_rates_of_each():
    sgd = record(3, config=TrainingConfig(optimizer="sgd"))
    kinds = reasons(SMALL, sgd, record(4, config=LORA))
    assert "; full training at adamw 2e-05 and sgd 0.001, lora at adamw 0.0003" in kinds.reason


def test_a_pick_of_one_kind_of_training_names_no_learning_rates():
    assert reasons(SMALL, record(3, config=TrainingConfig(optimizer="sgd"))).learning_rates == ""


# -- why -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefer", "words"),
    [
        ("fastest", "the fastest"),
        ("smallest", "the smallest"),
        ("balanced", "the best balance of speed and memory"),
    ],
)
def test_the_reason_says_what_was_preferred(prefer, words):
    assert pick(prefer=prefer).reason.startswith(f"{words} on the front")


def test_the_reason_names_the_allowance_and_the_best_perplexity():
    assert "within 5 % of the best, 10" in pick(max_perplexity_increase=0.05).reason


def test_the_reason_says_what_is_saved():
    baseline = record(9, memory=600 * MIB, speed=1000.0, perplexity=10.0, outcome="over_cap")
    assert savings(FAST, baseline) in pick([*ALL, baseline], baseline=baseline).reason


@pytest.mark.parametrize(
    ("spreads", "words"),
    [
        ((80.0, 30.0), "1.10x the speed (no difference beyond the noise), "),
        ((40.0, 30.0), "1.10x the speed, "),
        ((None, None), "1.10x the speed, "),
    ],
)
def test_a_speed_within_the_measured_spreads_is_no_difference(spreads, words):
    faster, plain = (
        record(number, speed=speed, tokens_per_second_spread=spread)
        for number, speed, spread in zip((1, 0), (1100.0, 1000.0), spreads, strict=True)
    )
    assert words in savings(faster, plain)


def test_a_noisy_baseline_is_warned_of():
    noisy = record(0, speed=1000.0, tokens_per_second_spread=390.0, memory=200 * MIB)
    picked = choose(
        [noisy, record(1, speed=3000.0)], [1], baseline=noisy, preferences=Preferences()
    )
    assert "the baseline's speed varied by ±39 %" in picked.doubt


def test_a_noisy_pick_and_a_noisy_baseline_are_both_warned_of():
    noisy, picked = (
        record(number, speed=1000.0, tokens_per_second_spread=spread, memory=memory * MIB)
        for number, spread, memory in ((0, 390.0, 200), (1, 250.0, 100))
    )
    warning = choose([noisy, picked], [1], baseline=noisy, preferences=Preferences()).doubt
    assert "its speed varied by ±25 % and the baseline's speed varied by ±39 %, so" in warning


def test_a_baseline_that_was_not_measured_is_compared_as_predicted_and_said_to_be():
    asked = Preferences()
    chosen = choose(
        ALL,
        pareto_front(ALL, tolerance=asked.tolerance),
        baseline=None,
        preferences=asked,
        expected=expected(),
    )
    assert "against the baseline, which is only predicted: 98 % less memory" in chosen.comparison
    assert chosen.comparison.endswith("about 0.038 times the speed")


def test_savings_are_counted_against_the_baseline():
    one = record(1, memory=50 * MIB, speed=1200.0, perplexity=10.1)
    baseline = record(0, memory=200 * MIB, speed=1000.0, perplexity=10.0)
    assert savings(one, baseline) == (
        "against the baseline: 75 % less memory (50.00 MiB for 200.0 MiB), 1.20x the speed, "
        "perplexity +1.00 %"
    )


def test_more_memory_than_the_baseline_is_not_called_less():
    assert "100 % more memory" in savings(record(1, memory=200 * MIB), record(0, memory=100 * MIB))


def test_without_a_baseline_nothing_is_saved():
    assert savings(record(1), None) == ""


def test_against_a_baseline_that_was_not_measured_nothing_is_saved():
    assert savings(record(1), out_of_memory(0)) == ""


def test_the_baseline_itself_is_called_so():
    assert savings(record(0), record(0)) == "it is the baseline"


def test_a_baseline_without_a_speed_is_compared_by_memory_alone():
    baseline = record(0, memory=200 * MIB, speed=None, perplexity=None, outcome="over_cap")
    assert (
        savings(record(1), baseline)
        == "against the baseline: 50 % less memory (100.0 MiB for 200.0 MiB)"
    )


# -- when nothing fits -----------------------------------------------------------------------------


def test_the_closest_miss_was_over_the_cap_by_least():
    trials = [
        record(n, memory=memory, outcome="over_cap") for n, memory in enumerate([900, 700, 800])
    ]
    assert closest_miss(trials).number == 1


def test_the_closest_miss_is_judged_by_what_the_device_must_have():
    trials = [
        record(0, memory=100, device_bytes=900, outcome="over_cap"),
        record(1, memory=200, device_bytes=800, outcome="over_cap"),
    ]
    assert closest_miss(trials).number == 1


def test_a_trial_that_fits_or_got_no_number_is_no_miss():
    assert closest_miss([record(0), out_of_memory(1), record(2, outcome="crashed")]) is None


def test_tolerances_change_what_can_be_picked():
    trials = [record(0, memory=100, speed=1000.0), record(1, memory=101, speed=1020.0)]
    assert [pick(trials, tolerance=Tolerance(speed=share)).number for share in (0.03, 0.0)] == [
        0,
        1,
    ]


@pytest.mark.parametrize(("spread", "warned"), [(10.0, False), (560.0, True)])
def test_a_pick_whose_speed_varied_much_comes_with_a_warning(spread, warned):
    picked = record(0, speed=1000.0, tokens_per_second_spread=spread)
    reason = choose([picked], [0], baseline=None, preferences=Preferences()).reason
    assert ("do not trust speeds" in reason) == warned


def test_a_perplexity_beyond_any_vocabulary_asks_whether_the_loss_is_a_sum():
    summed = choose([record(0, perplexity=1e68)], [0], baseline=None, preferences=Preferences())
    assert summed.doubt.startswith("its loss of 156.6 nats a token")
    assert "is it a sum?" in summed.doubt
    mean = choose([record(0, perplexity=9e5)], [0], baseline=None, preferences=Preferences())
    assert mean.doubt == ""


def test_a_pick_in_16_bit_from_one_training_says_that_rounding_may_decide():
    full = record(0, memory=100 * MIB, speed=1000.0, perplexity=10.0)
    in_16_bit = TrainingConfig(precision="bf16-mixed")
    reduced = record(1, memory=200 * MIB, speed=1500.0, perplexity=10.05, config=in_16_bit)
    assert "is of one seed" in pick([full, reduced]).reason
    slower = record(2, memory=50 * MIB, speed=900.0, perplexity=10.05, config=in_16_bit)
    assert "is of one seed" not in pick([full, slower]).reason
    repeated = [replace(one, perplexity_spread=0.1) for one in (full, reduced)]
    assert "is of one seed" not in pick(repeated).reason


def test_a_tolerance_of_another_type_is_rejected_with_what_to_write():
    with pytest.raises(InvalidInput, match="there is no setting 'spead'") as found:
        check_preferences(Preferences(tolerance={"spead": 0.1}))
    assert "did you mean 'speed'" in found.value.hint


@pytest.mark.parametrize(
    ("parity", "message", "warning"),
    [
        ("same", "at most, the loss of step 1 is 0 % off", ""),
        ("not compared", "out of memory", "not compared with plain training: out of memory"),
        (
            "same at two blocks",
            "at two blocks, at most, the loss of step 1 is 0 % off (out of memory)",
            "compared with plain training at two blocks, at most, the loss of step 1 is 0 % off "
            "(out of memory)",
        ),
    ],
)
def test_a_pick_that_was_not_compared_as_a_whole_says_so(parity, message, warning):
    picked = pick([replace(SMALL, parity=parity, parity_message=message)])
    assert picked.doubt == warning
