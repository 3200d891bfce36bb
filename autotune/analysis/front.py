"""The Pareto front of peak memory, speed and perplexity, insensitive to measurement noise."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy
from numpy.typing import NDArray

from autotune.analysis.tolerance import NOISE_DEVIATIONS, Tolerance
from autotune.spec.result import TrialRecord

LARGEST_SPEED_NOISE = 0.5
"""A trial that is twice as fast is faster, however noisy the device."""

Column: TypeAlias = NDArray[numpy.float64]
Truth: TypeAlias = NDArray[numpy.bool_]


@dataclass(frozen=True, kw_only=True)
class _Points:
    """The objectives of trials, each [trial]."""

    peak_memory_bytes: NDArray[numpy.int64]
    tokens_per_second: Column
    speed_error: Column
    """Relative standard error; 0 where it is not known."""
    perplexity: Column
    perplexity_spread: Column
    perplexity_says_nothing: Truth

    @classmethod
    def of(cls, records: Sequence[TrialRecord]) -> "_Points":
        """Return the objectives of `records`, in which all must have been measured."""
        return cls(
            peak_memory_bytes=numpy.array(
                [record.peak_memory_bytes for record in records], dtype=numpy.int64
            ),
            tokens_per_second=numpy.array(
                [record.tokens_per_second for record in records], dtype=float
            ),
            speed_error=numpy.array([record.speed_error or 0.0 for record in records], dtype=float),
            perplexity=numpy.array([record.perplexity for record in records], dtype=float),
            perplexity_spread=numpy.array(
                [record.perplexity_spread or 0.0 for record in records], dtype=float
            ),
            perplexity_says_nothing=numpy.array(
                [record.perplexity_says_nothing for record in records], dtype=bool
            ),
        )

    def at(self, indices: Any) -> "_Points":
        return _Points(**{name: column[indices] for name, column in vars(self).items()})


def pareto_front(records: Iterable[TrialRecord], *, tolerance: Tolerance) -> tuple[int, ...]:
    """Return the numbers of the feasible trials that no other dominates, in the order of memory.

    One trial dominates another if it is worse on no objective and better on one, each by more than
    the tolerance. In the order of memory, speed, perplexity and number, each trial is compared only
    with those already on the front. So noise adds no points, and nearly equal trials do not remove
    each other in a chain.
    """
    feasible = [record for record in records if record.feasible]
    points = _Points.of(feasible)
    numbers = numpy.array([record.number for record in feasible])
    remaining = numpy.lexsort(
        (numbers, points.perplexity, -points.tokens_per_second, points.peak_memory_bytes)
    )
    front: list[int] = []
    while len(remaining):
        # The first remaining trial is on the front, and removes all that it dominates.
        first, others = remaining[0], remaining[1:]
        front.append(int(numbers[first]))
        is_dominated = _dominates(points.at(first), points.at(others), tolerance)
        remaining = others[~is_dominated]
    return tuple(front)


class TrialIndex:
    """The feasible trials of a study, fastest first, prepared for many comparisons."""

    def __init__(self, records: Iterable[TrialRecord]) -> None:
        feasible = (record for record in records if record.feasible)
        self._fastest_first = sorted(
            feasible, key=lambda record: -(record.tokens_per_second or 0.0)
        )
        self._points = _Points.of(self._fastest_first)

    def no_worse(
        self, other: TrialRecord, *, tolerance: Tolerance, speed_factor: float = 1.0
    ) -> Iterator[TrialRecord]:
        """Yield the trials worse than `other` on no objective by more than its tolerance.

        They come fastest first. `other` may be of another study; `speed_factor` is then how many
        times faster a common configuration, such as the baseline, ran in the study of this index.
        Yields nothing if an objective of `other` was not measured.
        """
        if None in (other.peak_memory_bytes, other.tokens_per_second, other.perplexity):
            return
        point = _Points.of([other])
        at_our_speed = replace(point, tokens_per_second=point.tokens_per_second * speed_factor)
        for index in numpy.flatnonzero(_is_no_worse(self._points, at_our_speed, tolerance)):
            yield self._fastest_first[index]


def _dominates(one: _Points, other: _Points, tolerance: Tolerance) -> Truth:
    """Return whether `one` is no worse than `other`, and better on one objective.

    Differences within the tolerance count as equal.
    """
    return _is_no_worse(one, other, tolerance) & (
        (one.peak_memory_bytes < other.peak_memory_bytes)
        | (
            one.tokens_per_second
            > other.tokens_per_second * (1 + _speed_noise(one, other, tolerance))
        )
        | (
            _have_perplexities(one, other)
            & (one.perplexity < other.perplexity - _perplexity_noise(one, other, tolerance))
        )
    )


def _is_no_worse(one: _Points, other: _Points, tolerance: Tolerance) -> Truth:
    needs_more = one.peak_memory_bytes > other.peak_memory_bytes
    is_slower = one.tokens_per_second < other.tokens_per_second * (
        1 - _speed_noise(one, other, tolerance)
    )
    noise = _perplexity_noise(one, other, tolerance)
    is_less_accurate = (one.perplexity > other.perplexity + noise) & _have_perplexities(one, other)
    return ~(needs_more | is_slower | is_less_accurate)


def _have_perplexities(one: _Points, other: _Points) -> Truth:
    """Return whether both perplexities count; otherwise neither is better nor worse."""
    return ~(one.perplexity_says_nothing | other.perplexity_says_nothing)


def _speed_noise(one: _Points, other: _Points, tolerance: Tolerance) -> Column:
    """Return the relative difference in speed that is tolerated.

    It is at least NOISE_DEVIATIONS standard deviations of a difference between the two.
    """
    noise = NOISE_DEVIATIONS * numpy.hypot(one.speed_error, other.speed_error)
    return numpy.minimum(numpy.maximum(tolerance.speed, noise), LARGEST_SPEED_NOISE)


def _perplexity_noise(one: _Points, other: _Points, tolerance: Tolerance) -> Column:
    """Return the tolerated difference in perplexity, at least the spread over seeds."""
    spreads = numpy.maximum(one.perplexity_spread, other.perplexity_spread)
    return numpy.maximum(tolerance.perplexity * other.perplexity, spreads)
