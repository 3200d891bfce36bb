"""Early stopping: a training ends once another trial of its numerics class dominates it.

Trials of the same numerics class have the same perplexity. A trial that needs more memory and is
slower than another one can therefore not reach the Pareto front, whatever the rest of its training
would measure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.spec.schema import Schema

SETTLED_STEPS = 3
"""Timed steps after which the median speed is compared with the other trials."""

LEAST_SPEED_MARGIN = 1.1
"""The other trial must be faster by at least this factor, because the median of a few steps is less
precise than that of a whole training."""
NOISE_DEVIATIONS = 2.0
"""The margin is at least so many standard deviations of the difference of two speeds, so that an
equal trial is rarely ended: at a noise of 9.4 % a margin of 1.1 ended one in 24 % of cases."""


@dataclass(frozen=True, kw_only=True)
class PruningBound(Schema):
    """Memory and speed of a feasible trial of the same numerics class."""

    number: int
    peak_memory_bytes: int
    tokens_per_second: float
    speed_margin: float = LEAST_SPEED_MARGIN
    """By which factor it must be faster to end another trial."""


def speed_margin(speed_noise: float) -> float:
    """Returns the margin for a relative standard deviation of one speed between runs."""
    return max(LEAST_SPEED_MARGIN, 1.0 + NOISE_DEVIATIONS * math.sqrt(2.0) * speed_noise)


def dominated_by(
    pruning_bounds: Sequence[PruningBound], *, peak_memory_bytes: int, tokens_per_second: float
) -> PruningBound | None:
    """Returns the first bound with no more memory and a speed above the margin, or None."""
    for bound in pruning_bounds:
        is_faster = bound.tokens_per_second > bound.speed_margin * tokens_per_second
        if bound.peak_memory_bytes <= peak_memory_bytes and is_faster:
            return bound
    return None
