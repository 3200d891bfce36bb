"""The Pareto front of peak memory, speed and perplexity, insensitive to measurement noise."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autotune.errors import InvalidInput
from autotune.result import TrialRecord

DEFAULT_SPEED_TOLERANCE = 0.03
DEFAULT_PERPLEXITY_TOLERANCE = 0.005


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Relative differences that are no differences. Peak memory is exact and has none."""

    speed: float = DEFAULT_SPEED_TOLERANCE
    perplexity: float = DEFAULT_PERPLEXITY_TOLERANCE

    def __post_init__(self) -> None:
        for name, value in (("speed", self.speed), ("perplexity", self.perplexity)):
            if not 0 <= value < 1:
                raise InvalidInput(f"a {name} tolerance of {value} is not possible", hint="use 0 up to below 1")


@dataclass(frozen=True, kw_only=True)
class _Point:
    """The objectives of a feasible trial."""

    peak_memory_bytes: int
    tokens_per_second: float
    perplexity: float
    perplexity_spread: float
    number: int


def pareto_front(records: Iterable[TrialRecord], *, tolerance: Tolerance) -> tuple[int, ...]:
    """Numbers of the feasible trials that no other dominates, in the order of their memory.

    One pass over the trials sorted by memory, speed, perplexity and number, comparing only with those already kept,
    so that noise adds no points and near-equal trials never remove each other in a chain.
    """
    points = sorted(
        map(_point, (record for record in records if record.feasible)),
        key=lambda p: (p.peak_memory_bytes, -p.tokens_per_second, p.perplexity, p.number),
    )
    kept: list[_Point] = []
    for point in points:
        if not any(_dominates(other, point, tolerance) for other in kept):
            kept.append(point)
    return tuple(point.number for point in kept)


def _point(record: TrialRecord) -> _Point:
    assert record.peak_memory_bytes is not None
    assert record.tokens_per_second is not None
    assert record.perplexity is not None
    return _Point(
        peak_memory_bytes=record.peak_memory_bytes,
        tokens_per_second=record.tokens_per_second,
        perplexity=record.perplexity,
        perplexity_spread=record.perplexity_spread or 0.0,
        number=record.number,
    )


def no_worse(
    other: TrialRecord, records: Iterable[TrialRecord], *, tolerance: Tolerance, speed_factor: float = 1.0
) -> tuple[TrialRecord, ...]:
    """The feasible trials that are worse than `other` on no objective by more than its tolerance, fastest first.

    `other` may be of another study; `speed_factor` is then how many times faster a common configuration, such as the
    baseline, ran in the study of `records`. Empty where not all objectives of `other` were measured.
    """
    if None in (other.peak_memory_bytes, other.tokens_per_second, other.perplexity):
        return ()
    point = _point(other)
    at_our_speed = replace(point, tokens_per_second=point.tokens_per_second * speed_factor)
    found = [r for r in records if r.feasible and _is_no_worse(_point(r), at_our_speed, tolerance)]
    return tuple(sorted(found, key=lambda record: -(record.tokens_per_second or 0.0)))


def _dominates(one: _Point, other: _Point, tolerance: Tolerance) -> bool:
    """`one` is worse on no objective by more than its tolerance, and better on one by more than its tolerance."""
    return _is_no_worse(one, other, tolerance) and (
        one.peak_memory_bytes < other.peak_memory_bytes
        or one.tokens_per_second > other.tokens_per_second * (1 + tolerance.speed)
        or one.perplexity < other.perplexity - _perplexity_noise(one, other, tolerance)
    )


def _is_no_worse(one: _Point, other: _Point, tolerance: Tolerance) -> bool:
    slower = one.tokens_per_second < other.tokens_per_second * (1 - tolerance.speed)
    less_sure = one.perplexity > other.perplexity + _perplexity_noise(one, other, tolerance)
    return not (one.peak_memory_bytes > other.peak_memory_bytes or slower or less_sure)


def _perplexity_noise(one: _Point, other: _Point, tolerance: Tolerance) -> float:
    """A perplexity measured over seeds has no smaller tolerance than its spread."""
    return max(tolerance.perplexity * other.perplexity, one.perplexity_spread, other.perplexity_spread)


def perplexity_spread(records: Sequence[TrialRecord]) -> float:
    """Relative spread of perplexity among trials that compute the same numbers: the noise of its measurement.

    The pooled standard deviation over all numerics classes with at least two trained trials, or the largest over
    seeds where that is more; 0 where there is neither.
    """
    classes: dict[tuple[str, ...], list[float]] = defaultdict(list)
    over_seeds = 0.0
    for record in records:
        is_shared = (record.perplexity_source or "").startswith("shared")
        if record.outcome in ("ok", "over_cap") and record.perplexity is not None and not is_shared:
            over_seeds = max(over_seeds, (record.perplexity_spread or 0.0) / record.perplexity)
            classes[record.config.numerics_class].append(record.perplexity)
    repeated = [values for values in classes.values() if len(values) > 1]
    if not repeated:
        return over_seeds
    squares = sum(sum((v / statistics.fmean(values) - 1) ** 2 for v in values) for values in repeated)
    degrees_of_freedom = sum(len(values) - 1 for values in repeated)
    return max(over_seeds, float((squares / degrees_of_freedom) ** 0.5))
