"""The Pareto front of peak memory, speed and perplexity, insensitive to measurement noise.

One trial *dominates* another if it is worse on no objective and better on one, each by more than
the tolerance; memory is exact and has none. The front has the feasible trials that no other one
dominates, and of those that are equal within the tolerance one for all.

- There is a front. A trial needs at least as much memory as one that dominates it. So the way from
  a trial to one that dominates it, and so on, ends: at a trial that none dominates, or in a circle
  of trials with the same memory. Noise that differs between pairs, and perplexities that say
  nothing, make such circles possible. One of them stands for all, as with equal trials.
- Equal trials do not remove each other in a chain: one is left out only for an equal one that is on
  the front itself.
- A further trial never makes the pick worse. What none of many trials dominates, none of some of
  them dominates: so only the new trial, and trials that were as good as one on the front, can come
  to the front. The pick changes where the new trial is preferred, is as good or dominates it, or
  where it changes which perplexities are good; the old pick never dominates the new one.

Being equal within the noise is not transitive: of 20 MiB at 975 tokens/s, 21 MiB at 1,000 and
64 MiB at 1,020, each is as fast as the next and smaller, and the last is 4.6 % faster than the
first. Only the first is on the front: a trial that is dominated is never recommended, also where
that by which it is dominated is not recommended either.

Speeds are compared on one scale (`confirmed_speed.on_one_scale`). Between a confirmed trial and one
that was not confirmed, the confirmed one has the benefit of the noise: only a trial that is faster
beyond it dominates a confirmed one.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy
from numpy.typing import NDArray

from autotune.analysis.confirmed_speed import measured_alone
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
    is_confirmed: Truth
    tokens_per_second: Column
    speed_error: Column
    """Relative standard error; 0 where it is not known."""
    alone_tokens_per_second: Column
    """The speed of the trial itself, also where it was confirmed in turn."""
    alone_error: Column
    perplexity: Column
    perplexity_spread: Column
    perplexity_says_nothing: Truth

    @classmethod
    def of(cls, records: Sequence[TrialRecord]) -> "_Points":
        """Returns the objectives of `records`, in which all must have been measured."""
        alone = [measured_alone(record) for record in records]
        return cls(
            peak_memory_bytes=numpy.array(
                [record.peak_memory_bytes for record in records], dtype=numpy.int64
            ),
            is_confirmed=numpy.array([record.confirmations > 0 for record in records], dtype=bool),
            tokens_per_second=_speeds(records),
            speed_error=_speed_errors(records),
            alone_tokens_per_second=_speeds(alone),
            alone_error=_speed_errors(alone),
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
    """Returns the numbers of the feasible trials that no other dominates, in the order of memory.

    Of equal trials it has one: the confirmed one, otherwise that with the best perplexity.
    """
    feasible = [record for record in records if record.feasible]
    points = _Points.of(feasible)
    numbers = numpy.array([record.number for record in feasible])
    remaining = numpy.lexsort(
        (
            numbers,
            -points.tokens_per_second,
            points.perplexity,
            ~points.is_confirmed,
            points.peak_memory_bytes,
        )
    )
    candidates: list[int] = []
    while len(remaining):
        # Trials that nobody dominates are never removed here, nor is the first of a circle.
        first, others = int(remaining[0]), remaining[1:]
        candidates.append(first)
        is_dominated = _dominates(points.at(first), points.at(others), tolerance)
        remaining = others[~is_dominated]
    front: list[int] = []
    circles: set[int] = set()
    for candidate in candidates:
        above = _above(points, candidate, tolerance)
        if not all(candidate in _above(points, other, tolerance) for other in above):
            continue
        is_represented = _represents(points.at(front), points.at(candidate), tolerance).any()
        if candidate not in circles and not is_represented:
            front.append(candidate)
            circles |= above
    return tuple(int(number) for number in numbers[front])


class TrialIndex:
    """The feasible trials of a study, fastest first, prepared for many comparisons."""

    def __init__(self, records: Iterable[TrialRecord]) -> None:
        feasible = (record for record in records if record.feasible)
        self._fastest_first = sorted(
            feasible, key=lambda record: -(measured_alone(record).tokens_per_second or 0.0)
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
        at_our_speed = replace(
            point,
            tokens_per_second=point.tokens_per_second * speed_factor,
            alone_tokens_per_second=point.alone_tokens_per_second * speed_factor,
        )
        for index in numpy.flatnonzero(_is_no_worse(self._points, at_our_speed, tolerance)):
            yield self._fastest_first[index]


def _above(points: _Points, index: int, tolerance: Tolerance) -> set[int]:
    """Returns the trials that dominate the trial at `index`, directly or through others.

    It ends with those that need less memory, which none of equal memory dominates in turn.
    """
    found: set[int] = set()
    remaining = [index]
    while remaining:
        other = points.at(remaining.pop())
        new = set(numpy.flatnonzero(_dominates(points, other, tolerance)).tolist()) - found
        found |= new
        remaining += [
            one for one in new if points.peak_memory_bytes[one] == points.peak_memory_bytes[index]
        ]
    return found


def _dominates(one: _Points, other: _Points, tolerance: Tolerance) -> Truth:
    """Returns whether `one` is no worse than `other`, and better on one objective.

    Differences within the tolerance count as equal.
    """
    speed, other_speed = _speeds_on_one_scale(one, other)
    return _is_no_worse(one, other, tolerance) & (
        (one.peak_memory_bytes < other.peak_memory_bytes)
        | (speed > other_speed * (1 + _speed_noise(one, other, tolerance)))
        | (
            _have_perplexities(one, other)
            & (one.perplexity < other.perplexity - _perplexity_noise(one, other, tolerance))
        )
    )


def _represents(one: _Points, other: _Points, tolerance: Tolerance) -> Truth:
    """Returns whether `one` equals `other`, which it does not dominate.

    Where it is no worse either, the two differ by noise alone. Perplexities of both count, or of
    neither.
    """
    is_other_kind: Truth = one.perplexity_says_nothing ^ other.perplexity_says_nothing
    return ~is_other_kind & _is_no_worse(one, other, tolerance)


def _is_no_worse(one: _Points, other: _Points, tolerance: Tolerance) -> Truth:
    needs_more = one.peak_memory_bytes > other.peak_memory_bytes
    speed, other_speed = _speeds_on_one_scale(one, other)
    speed_noise = _speed_noise(one, other, tolerance)
    # What was confirmed is given up only for a trial that is faster beyond the noise.
    only_other = other.is_confirmed & ~one.is_confirmed
    is_slower: Truth = speed < other_speed * (
        1 + numpy.where(only_other, speed_noise, -speed_noise)
    )
    noise = _perplexity_noise(one, other, tolerance)
    is_less_accurate = (one.perplexity > other.perplexity + noise) & _have_perplexities(one, other)
    return ~(needs_more | is_slower | is_less_accurate)


def _speeds(records: Sequence[TrialRecord]) -> Column:
    return numpy.array([record.tokens_per_second for record in records], dtype=float)


def _speed_errors(records: Sequence[TrialRecord]) -> Column:
    return numpy.array([record.speed_error or 0.0 for record in records], dtype=float)


def _speeds_on_one_scale(one: _Points, other: _Points) -> tuple[Column, Column]:
    """Returns the confirmed speeds of pairs of which both were confirmed, else those alone."""
    both = one.is_confirmed & other.is_confirmed
    return (
        numpy.where(both, one.tokens_per_second, one.alone_tokens_per_second),
        numpy.where(both, other.tokens_per_second, other.alone_tokens_per_second),
    )


def _have_perplexities(one: _Points, other: _Points) -> Truth:
    """Returns whether both perplexities count; otherwise neither is better nor worse."""
    return ~(one.perplexity_says_nothing | other.perplexity_says_nothing)


def _speed_noise(one: _Points, other: _Points, tolerance: Tolerance) -> Column:
    """Returns the relative difference in speed that is tolerated.

    It is at least NOISE_DEVIATIONS standard deviations of a difference between the two.
    """
    both = one.is_confirmed & other.is_confirmed
    error = numpy.where(
        both,
        numpy.hypot(one.speed_error, other.speed_error),
        numpy.hypot(one.alone_error, other.alone_error),
    )
    noise = NOISE_DEVIATIONS * error
    return numpy.minimum(numpy.maximum(tolerance.speed, noise), LARGEST_SPEED_NOISE)


def _perplexity_noise(one: _Points, other: _Points, tolerance: Tolerance) -> Column:
    """Returns the tolerated difference in perplexity, at least the spread over seeds."""
    spreads = numpy.maximum(one.perplexity_spread, other.perplexity_spread)
    return numpy.maximum(tolerance.perplexity * other.perplexity, spreads)
