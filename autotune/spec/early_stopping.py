"""When a training need not go on: another of the same numerics class needs less memory and is faster.

Equal numerics mean equal perplexity, so that nothing the rest of the training would measure could
bring the trial onto the front.
"""

from collections.abc import Sequence
from dataclasses import dataclass

SETTLED_STEPS = 3
"""Timed steps after which the median speed is held against the rivals'."""

SPEED_MARGIN = 1.1
"""A rival must be faster by this factor: the median of a few steps is less sure than that of a
whole training."""


@dataclass(frozen=True, kw_only=True)
class PruningBound:
    """A feasible trial of the same numerics class."""

    number: int
    peak_memory_bytes: int
    tokens_per_second: float


def dominated_by(
    pruning_bounds: Sequence[PruningBound], *, peak_memory_bytes: int, tokens_per_second: float
) -> PruningBound | None:
    """The first rival that needs no more memory and is faster by more than the margin; None where there is none."""
    for rival in pruning_bounds:
        is_faster = rival.tokens_per_second > SPEED_MARGIN * tokens_per_second
        if rival.peak_memory_bytes <= peak_memory_bytes and is_faster:
            return rival
    return None
