"""Early stopping: a training ends once another trial of its numerics class dominates it.

Trials of the same numerics class have the same perplexity. A trial that needs more memory and is
slower than another one can therefore not reach the Pareto front, whatever the rest of its training
would measure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

SETTLED_STEPS = 3
"""Timed steps after which the median speed is compared with the other trials."""

SPEED_MARGIN = 1.1
"""The other trial must be faster by this factor, because the median of a few steps is less precise
than that of a whole training."""


@dataclass(frozen=True, kw_only=True)
class PruningBound:
    """Memory and speed of a feasible trial of the same numerics class."""

    number: int
    peak_memory_bytes: int
    tokens_per_second: float


def dominated_by(
    pruning_bounds: Sequence[PruningBound], *, peak_memory_bytes: int, tokens_per_second: float
) -> PruningBound | None:
    """Return the first bound with no more memory and a speed above the margin, or None."""
    for bound in pruning_bounds:
        is_faster = bound.tokens_per_second > SPEED_MARGIN * tokens_per_second
        if bound.peak_memory_bytes <= peak_memory_bytes and is_faster:
            return bound
    return None
