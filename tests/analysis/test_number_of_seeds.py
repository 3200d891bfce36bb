"""Perplexities of one number of seeds in a study that has several."""

from dataclasses import replace

from autotune.analysis.confirmed import confirmed_records
from autotune.analysis.front import pareto_front
from autotune.analysis.number_of_seeds import with_one_number_of_seeds
from autotune.analysis.tolerance import Tolerance
from autotune.reporting.trial_text import format_perplexity, perplexity_source_text
from autotune.spec.provenance import MEASURED, FailedSeed
from tests.building.results import mean_of, record, shared_with
from tests.building.studies import config

FULL = config(0)
MIXED = replace(FULL, precision="bf16-mixed")
CHECKPOINTED = replace(FULL, checkpointing="block")


def trained(number, one, *, perplexity, source=MEASURED, parity="same", **changes):
    return record(
        number,
        config=one,
        perplexity=perplexity,
        perplexity_source=source,
        parity=parity,
        **changes,
    )


def test_a_perplexity_of_other_seeds_is_on_no_front_and_says_so():
    records = [
        trained(0, FULL, perplexity=32.9),
        trained(1, MIXED, perplexity=20.0, source=mean_of(3)),
    ]
    first, other = with_one_number_of_seeds(records)
    assert first == records[0]
    assert pareto_front([first, other], tolerance=Tolerance()) == (0,)
    assert (other.perplexity, format_perplexity(other)) == (20.0, "(20.00)")
    assert "first trial has another number of seeds" in perplexity_source_text(other)
    assert confirmed_records(records, []) == [first, other]


def test_it_takes_that_of_a_trial_that_trains_the_same_with_the_seeds_of_the_study():
    records = [
        trained(0, FULL, perplexity=33.1, source=mean_of(3), perplexity_spread=1.0),
        trained(1, CHECKPOINTED, perplexity=33.8),
        trained(2, replace(CHECKPOINTED, micro_batch_size=1), perplexity=33.8),
        trained(3, CHECKPOINTED, perplexity=33.8, parity="not compared"),
    ]
    found = with_one_number_of_seeds(records)
    assert (found[1].perplexity, found[1].perplexity_spread) == (33.1, 1.0)
    assert found[1].perplexity_source == shared_with(0)
    assert [one.perplexity_source.of_other_seeds for one in found[2:]] == [True, True]


def test_what_shares_a_perplexity_has_its_number_of_seeds():
    records = [
        trained(0, FULL, perplexity=33.1),
        trained(1, MIXED, perplexity=20.0, source=mean_of(3)),
        trained(2, replace(MIXED, checkpointing="block"), perplexity=20.0, source=shared_with(1)),
        trained(3, CHECKPOINTED, perplexity=33.1, source=shared_with(0)),
        trained(4, CHECKPOINTED, perplexity=33.1, source=shared_with(9, "earlier")),
    ]
    found = with_one_number_of_seeds(records)
    assert [one.perplexity_says_nothing for one in found] == [False, True, True, False, False]


def test_a_study_of_one_number_of_seeds_stays_as_it_is():
    failed = mean_of(2, FailedSeed(seed=2, reason="crashed"))
    one_seed = [trained(0, FULL, perplexity=33.1), trained(1, MIXED, perplexity=33.2)]
    of_three = [replace(one, perplexity_source=mean_of(3)) for one in one_seed]
    all_failed = [replace(one, perplexity_source=failed) for one in one_seed]
    of_another_study = [
        trained(0, FULL, perplexity=33.1, source=shared_with(9, "earlier")),
        trained(1, CHECKPOINTED, perplexity=33.1, source=shared_with(0)),
    ]
    for records in (one_seed, of_three, all_failed, of_another_study):
        assert with_one_number_of_seeds(records) == records
