"""Perplexities over several seeds, and which classes need them."""

import math
import statistics

import pytest

from autotune.analysis.confirmed_perplexity import (
    classes_to_repeat,
    rounding_warning,
    with_seed_perplexities,
)
from autotune.spec.config import TrainingConfig
from autotune.spec.confirmation import SeedPerplexity
from autotune.spec.provenance import MEASURED
from autotune.spec.result import VARIANT_NUMBER
from tests.building.results import MIB, record, shared_with

FULL = TrainingConfig(micro_batch_size=8)
HALF = TrainingConfig(micro_batch_size=8, precision="bf16-true")
HALF_TOO = TrainingConfig(micro_batch_size=4, precision="bf16-true")


def seed(perplexity, *, config=HALF, number=1):
    return SeedPerplexity(config=config, seed=number, perplexity=perplexity, seconds=1.0)


def study():
    """Trial 1 is in 16 bit, trial 2 shares its perplexity, and trial 0 is in full precision."""
    return [
        record(0, config=FULL, speed=1000.0, perplexity=10.0, perplexity_source=MEASURED),
        record(1, config=HALF, speed=1500.0, perplexity=10.2, perplexity_source=MEASURED),
        record(
            2,
            config=HALF_TOO,
            speed=1400.0,
            perplexity=10.2,
            memory=50 * MIB,
            perplexity_source=shared_with(1),
        ),
    ]


def seeds_of_both(*pairs):
    """The perplexities of further seeds, in full precision and in 16 bit."""
    found = []
    for number, (full, half) in enumerate(pairs, start=1):
        found += [seed(full, config=FULL, number=number), seed(half, number=number)]
    return found


def test_differences_to_full_precision_are_averaged_for_the_trial_and_all_that_share_with_it():
    """Both are higher with the further seeds, by which 16 bit is no worse than fp32."""
    measured = seeds_of_both((12.0, 12.12), (14.0, 14.0))
    full, half, sharing = with_seed_perplexities(study(), measured)
    assert full == study()[0]
    differences = [math.log(1.02), math.log(1.01), 0.0]
    for trial in (half, sharing):
        assert trial.perplexity == pytest.approx(10.0 * math.exp(statistics.fmean(differences)))
        assert trial.perplexity_spread == pytest.approx(
            trial.perplexity * statistics.stdev(differences)
        )


def test_seeds_without_their_training_in_full_precision_only_say_the_spread():
    full, half, sharing = with_seed_perplexities(study(), [seed(12.0)])
    assert full == study()[0]
    for trial in (half, sharing):
        assert trial.perplexity == 10.2
        assert trial.perplexity_spread == pytest.approx(
            10.2 * statistics.stdev([0.0, math.log(12.0 / 10.2)])
        )
        assert trial.perplexity_source in (MEASURED, shared_with(1))


def test_the_trial_says_over_how_many_seeds_and_the_other_one_with_whom_it_shares():
    _, half, sharing = with_seed_perplexities(study(), seeds_of_both((10.0, 9.9), (10.0, 9.9)))
    assert half.perplexity_source.seeds == 3
    assert sharing.perplexity_source == shared_with(1)


def test_bits_per_byte_are_those_of_the_mean():
    full = record(0, config=FULL, perplexity=16.0, perplexity_source=MEASURED)
    records = [full, record(1, config=HALF, perplexity=16.0, bits_per_byte=4.0)]
    _, half = with_seed_perplexities(records, seeds_of_both((16.0, 4.0)))
    assert half.perplexity == pytest.approx(8.0)
    assert half.bits_per_byte == pytest.approx(3.0)


def test_a_seed_that_failed_changes_nothing():
    failed = SeedPerplexity(config=HALF, seed=1, perplexity=None, failure="it ended", seconds=1.0)
    assert with_seed_perplexities(study(), [failed]) == study()


def test_a_trial_that_shares_with_one_of_another_study_keeps_its_perplexity():
    records = study()
    records[2] = record(2, config=HALF_TOO, perplexity=10.2, perplexity_source=shared_with(1, "a"))
    assert with_seed_perplexities(records, [seed(9.0)])[2] == records[2]


def test_a_variant_of_the_pick_is_not_taken_for_a_trial_with_seeds():
    variant = record(VARIANT_NUMBER, config=HALF, perplexity=10.2, perplexity_source=MEASURED)
    other = record(VARIANT_NUMBER, config=HALF_TOO, perplexity=11.0, perplexity_source=MEASURED)
    assert with_seed_perplexities([variant, other], [seed(9.0)]) == [variant, other]


# -- which classes need them -----------------------------------------------------------------------


def repeat(records):
    contenders = [one.number for one in records]
    return [one.number for one in classes_to_repeat(records, contenders=contenders)]


def test_a_class_in_16_bit_that_may_be_picked_is_repeated_with_full_precision():
    assert repeat(study()) == [0, 1]


def test_a_class_is_repeated_in_the_trial_that_measured_its_perplexity():
    repeated = classes_to_repeat(study(), contenders=(0, 2))
    assert [one.number for one in repeated] == [0, 1]


def test_a_class_in_16_bit_that_cannot_be_picked_is_not_repeated():
    assert classes_to_repeat(study(), contenders=(0,)) == []


def test_one_precision_alone_competes_with_none():
    assert repeat(study()[:1]) == []
    assert repeat(study()[1:]) == []


MIXED = TrainingConfig(micro_batch_size=8, precision="bf16-mixed")


def short_search():
    """A search on a GPU that has not measured full precision."""
    mixed = record(3, config=MIXED, speed=1400.0, perplexity=9.0, perplexity_source=MEASURED)
    return [*study()[1:], mixed]


def test_without_full_precision_the_classes_that_compete_are_compared_with_the_best_of_them():
    assert repeat(short_search()) == [3, 1]


def test_two_classes_that_were_equal_by_the_mean_of_seeds_are_told_so_without_full_precision():
    measured = [
        seed(12.0, config=MIXED, number=1),
        seed(11.0, number=1),
        seed(12.0, config=MIXED, number=2),
        seed(11.5, number=2),
    ]
    half, sharing, mixed = with_seed_perplexities(short_search(), measured)
    differences = [math.log(10.2 / 9.0), math.log(11 / 12), math.log(11.5 / 12)]
    for trial in (half, sharing):
        assert trial.perplexity == pytest.approx(9.0 * math.exp(statistics.fmean(differences)))
    assert (mixed.perplexity, mixed.perplexity_source.seeds) == (9.0, 3)
    assert note([half, sharing, mixed]) == ""


def test_without_full_precision_one_training_each_is_said_to_decide_by_chance():
    assert note(short_search()).startswith("perplexities (bf16-mixed, bf16-true) are of one seed")


def note(records):
    return rounding_warning(records, contenders=[one.number for one in records])


def test_a_comparison_by_one_training_each_is_said_until_further_seeds_are_trained():
    seeds = [seed(9.9), seed(9.9, config=FULL)]
    assert "is of one seed" in note(study())
    assert note(with_seed_perplexities(study(), seeds)) == ""


def test_where_one_training_decides_nothing_nothing_is_said_of_it():
    assert note(study()[:1]) == ""
