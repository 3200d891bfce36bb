"""Which differences between trials count as equal, and how noisy perplexity is.

`import autotune` and the help of commands need this, and `front.py`, which needs numpy, does not
load with it.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from autotune.analysis.confirmed_speed import on_one_scale
from autotune.spec.result import TrialRecord
from autotune.spec.setting import Settings, number

NOISE_DEVIATIONS = 2.0
"""Differences in speed below so many of their standard deviations count as equal."""
DEFAULT_SPEED_TOLERANCE = 0.03
DEFAULT_PERPLEXITY_TOLERANCE = 0.005
Share = Annotated[float, number("a share from 0 to below 1", least=0.0, most=1.0 - 1e-9)]


@dataclass(frozen=True, kw_only=True)
class Tolerance(Settings):
    """Relative differences that count as equal. Peak memory is exact and has no tolerance."""

    speed: Share = DEFAULT_SPEED_TOLERANCE
    perplexity: Share = DEFAULT_PERPLEXITY_TOLERANCE


def speed_noise_factor(record: TrialRecord, other: TrialRecord) -> float:
    """Returns the factor between two speeds that noise alone may make; 1 where it is not known."""
    error = math.hypot(record.speed_error or 0.0, other.speed_error or 0.0)
    return math.exp(NOISE_DEVIATIONS * error)


def is_same_speed(record: TrialRecord, other: TrialRecord) -> bool:
    """Returns whether two speeds differ by no more than is noise.

    Where the errors of both are known, noise is NOISE_DEVIATIONS standard deviations of their
    difference; otherwise the measured spreads of both over their steps, together. False without a
    measured spread, and without both speeds.
    """
    record, other = on_one_scale(record, other)
    if not record.tokens_per_second or not other.tokens_per_second:
        return False
    if record.speed_error is not None and other.speed_error is not None:
        difference = math.log(record.tokens_per_second / other.tokens_per_second)
        return abs(difference) <= math.log(speed_noise_factor(record, other))
    noise = (record.tokens_per_second_spread or 0.0) + (other.tokens_per_second_spread or 0.0)
    return noise > 0 and abs(record.tokens_per_second - other.tokens_per_second) <= noise


def perplexity_spread(records: Sequence[TrialRecord]) -> float:
    """Returns the relative noise of perplexity, among trials that compute the same numbers.

    It is the pooled standard deviation over the numerics classes with at least two trained trials,

        sqrt(sum over classes of sum((perplexity / class mean - 1)^2) / sum(class size - 1)),

    or the largest spread over seeds if that is larger; 0 if there is neither.
    """
    classes: dict[tuple[str, ...], list[float]] = defaultdict(list)
    over_seeds = 0.0
    for record in records:
        if record.shares_perplexity or record.perplexity is None:
            continue
        if record.perplexity_says_nothing:
            continue
        if record.was_trained:
            over_seeds = max(over_seeds, (record.perplexity_spread or 0.0) / record.perplexity)
            classes[record.config.numerics_class].append(record.perplexity)
    repeated = [values for values in classes.values() if len(values) > 1]
    if not repeated:
        return over_seeds
    squares = 0.0
    degrees_of_freedom = 0
    for values in repeated:
        mean = statistics.fmean(values)
        squares += sum((value / mean - 1) ** 2 for value in values)
        degrees_of_freedom += len(values) - 1
    return max(over_seeds, float((squares / degrees_of_freedom) ** 0.5))
