"""A training ends once another trial of the same numerics class dominates it."""

from autotune.spec.early_stopping import LEAST_SPEED_MARGIN, PruningBound, dominated_by

RIVAL = PruningBound(number=3, peak_memory_bytes=100, tokens_per_second=1000.0)


def test_a_trial_with_equal_memory_and_more_speed_dominates():
    assert dominated_by([RIVAL], peak_memory_bytes=100, tokens_per_second=800.0) == RIVAL


def test_a_trial_that_is_faster_within_the_margin_does_not_dominate():
    slower = 1000.0 / LEAST_SPEED_MARGIN + 1
    assert dominated_by([RIVAL], peak_memory_bytes=100, tokens_per_second=slower) is None


def test_a_trial_that_needs_more_memory_never_dominates():
    assert dominated_by([RIVAL], peak_memory_bytes=99, tokens_per_second=1.0) is None
