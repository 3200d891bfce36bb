"""The Pareto front of peak memory, speed and perplexity, insensitive to measurement noise."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from autotune.errors import InvalidInput
from autotune.spec.result import TrialRecord

if TYPE_CHECKING:  # preferences are read by commands that only print their help
    import numpy
    from numpy.typing import NDArray

    Column: TypeAlias = NDArray[numpy.float64]
    Truth: TypeAlias = NDArray[numpy.bool_]

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
                raise InvalidInput(
                    f"a {name} tolerance of {value} is not possible", hint="use 0 up to below 1"
                )


@dataclass(frozen=True, kw_only=True)
class _Points:
    """The objectives of trials, as columns."""

    peak_memory_bytes: "NDArray[numpy.int64]"
    tokens_per_second: "Column"
    perplexity: "Column"
    perplexity_spread: "Column"

    @classmethod
    def of(cls, records: Sequence[TrialRecord]) -> "_Points":
        """All objectives of all `records` must have been measured."""
        import numpy

        return cls(
            peak_memory_bytes=numpy.array(
                [record.peak_memory_bytes for record in records], dtype=numpy.int64
            ),
            tokens_per_second=numpy.array(
                [record.tokens_per_second for record in records], dtype=float
            ),
            perplexity=numpy.array([record.perplexity for record in records], dtype=float),
            perplexity_spread=numpy.array(
                [record.perplexity_spread or 0.0 for record in records], dtype=float
            ),
        )

    def at(self, places: Any) -> "_Points":
        return _Points(**{name: column[places] for name, column in vars(self).items()})


def pareto_front(records: Iterable[TrialRecord], *, tolerance: Tolerance) -> tuple[int, ...]:
    """Numbers of the feasible trials that no other dominates, in the order of their memory.

    In the order of memory, speed, perplexity and number each trial is compared only with those
    already kept, so that noise adds no points and near-equal trials never remove each other in a
    chain.
    """
    import numpy

    feasible = [record for record in records if record.feasible]
    points, numbers = _Points.of(feasible), numpy.array([record.number for record in feasible])
    left = numpy.lexsort(
        (numbers, points.perplexity, -points.tokens_per_second, points.peak_memory_bytes)
    )
    kept: list[int] = []
    while len(left):
        # The first that is left is kept; all that it dominates goes at once.
        kept.append(int(numbers[left[0]]))
        others = left[1:]
        left = others[~_dominates(points.at(left[0]), points.at(others), tolerance)]
    return tuple(kept)


class TrialIndex:
    """The feasible trials of a study, fastest first, to hold any number of trials against."""

    def __init__(self, records: Iterable[TrialRecord]) -> None:
        feasible = (record for record in records if record.feasible)
        self._fastest_first = sorted(
            feasible, key=lambda record: -(record.tokens_per_second or 0.0)
        )
        self._points = _Points.of(self._fastest_first)

    def no_worse(
        self, other: TrialRecord, *, tolerance: Tolerance, speed_factor: float = 1.0
    ) -> Iterator[TrialRecord]:
        """Those that are worse than `other` on no objective by more than its tolerance, fastest first.

        `other` may be of another study; `speed_factor` is then how many times faster a common
        configuration, such as the baseline, ran in the study of the rivals. Nothing where not all
        objectives of `other` were measured.
        """
        if None in (other.peak_memory_bytes, other.tokens_per_second, other.perplexity):
            return
        import numpy

        point = _Points.of([other])
        at_our_speed = replace(point, tokens_per_second=point.tokens_per_second * speed_factor)
        for place in numpy.flatnonzero(_is_no_worse(self._points, at_our_speed, tolerance)):
            yield self._fastest_first[place]


def _dominates(one: _Points, other: _Points, tolerance: Tolerance) -> "Truth":
    """`one` is worse on no objective by more than its tolerance, and better on one by more than its tolerance."""
    return _is_no_worse(one, other, tolerance) & (
        (one.peak_memory_bytes < other.peak_memory_bytes)
        | (one.tokens_per_second > other.tokens_per_second * (1 + tolerance.speed))
        | (one.perplexity < other.perplexity - _perplexity_noise(one, other, tolerance))
    )


def _is_no_worse(one: _Points, other: _Points, tolerance: Tolerance) -> "Truth":
    slower = one.tokens_per_second < other.tokens_per_second * (1 - tolerance.speed)
    less_sure = one.perplexity > other.perplexity + _perplexity_noise(one, other, tolerance)
    return ~((one.peak_memory_bytes > other.peak_memory_bytes) | slower | less_sure)


def _perplexity_noise(one: _Points, other: _Points, tolerance: Tolerance) -> "Column":
    """A perplexity measured over seeds has no smaller tolerance than its spread."""
    import numpy

    spreads = numpy.maximum(one.perplexity_spread, other.perplexity_spread)
    return numpy.maximum(tolerance.perplexity * other.perplexity, spreads)


def perplexity_spread(records: Sequence[TrialRecord]) -> float:
    """Relative spread of perplexity among trials that compute the same numbers: the noise of its measurement.

    The pooled standard deviation over all numerics classes with at least two trained trials, or the
    largest over seeds where that is more; 0 where there is neither.
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
    squares = sum(
        sum((v / statistics.fmean(values) - 1) ** 2 for v in values) for values in repeated
    )
    degrees_of_freedom = sum(len(values) - 1 for values in repeated)
    return max(over_seeds, float((squares / degrees_of_freedom) ** 0.5))
