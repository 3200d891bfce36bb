from autotune.analysis.counting_perplexity import (
    best_perplexity,
    has_good_perplexity,
    with_neutral_perplexities,
)
from tests.building.results import OVER_RANDOM, out_of_memory, record

FULL, WORSE = record(0, perplexity=20.0), record(1, perplexity=30.0)
RANDOM = record(2, perplexity=2.0, perplexity_source=OVER_RANDOM)


def test_the_best_perplexity_is_that_of_trials_that_count():
    assert best_perplexity([WORSE, RANDOM, FULL, out_of_memory(3)]) == 20.0
    assert best_perplexity([RANDOM]) is None


def test_a_perplexity_that_says_nothing_is_never_too_high():
    assert not has_good_perplexity(WORSE, best=20.0, allowed=0.01)
    high = record(3, perplexity=300.0, perplexity_source=OVER_RANDOM)
    assert has_good_perplexity(high, best=20.0, allowed=0.01)


def test_a_sampler_sees_the_best_perplexity_in_place_of_one_that_says_nothing():
    seen = with_neutral_perplexities([FULL, WORSE, RANDOM, out_of_memory(3)])
    assert [one.perplexity for one in seen] == [20.0, 30.0, 20.0, None]


def test_a_sampler_sees_equal_perplexities_where_none_counts():
    other = record(3, perplexity=300.0, perplexity_source=OVER_RANDOM)
    assert [one.perplexity for one in with_neutral_perplexities([RANDOM, other])] == [1.0, 1.0]
