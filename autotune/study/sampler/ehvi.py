"""Expected gain in hypervolume of trying a configuration whose memory and perplexity are known and whose speed is not.

With memory and perplexity known the expectation has a closed form: the dominated volume is a stack
of slices, one for each level of perplexity, and in each slice a staircase over memory; what a speed
adds above a stair is the expected improvement of Jones et al. ("Efficient global optimization of
expensive black-box functions", 1998). The hypervolume improvement as such: Emmerich, Giannakoglou
and Naujoks, "Single- and multiobjective evolutionary optimization assisted by Gaussian random field
metamodels", 2006.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

Array = NDArray[numpy.float64]

_SURELY_BELOW, _SURELY_ABOVE = 39.0, 9.0
"""Standard deviations at which a normal distribution function is 0 and 1 in a float."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Objectives of a trial, in any units: memory and perplexity smaller, speed larger is better."""

    memory: float
    speed: float
    perplexity: float


def not_dominated(points: Sequence[Point]) -> list[Point]:
    """Without those that another is as good as in everything; of equal ones the first stays."""
    rows = numpy.array([(point.memory, point.speed, point.perplexity) for point in points]).reshape(
        len(points), 3
    )
    return [points[place] for place in places_not_dominated(*rows.T)]


def places_not_dominated(memory: Array, speed: Array, perplexity: Array) -> list[int]:
    """The same of points as columns, in the order of their memory: as many passes as are kept, each over the others."""
    left = numpy.lexsort((perplexity, -speed, memory))
    kept = []
    while len(left):
        first = left[0]
        kept.append(int(first))
        left = left[(speed[left] > speed[first]) | (perplexity[left] < perplexity[first])]
    return kept


def hypervolume(points: Sequence[Point], *, reference: Point) -> float:
    """Volume that `points` dominate and that dominates `reference`."""
    total = 0.0
    for level in _levels(points, reference):
        stairs = _staircase(points, level.upper_end, reference)
        total += level.height * float(
            ((stairs.right - stairs.left) * (stairs.speed - reference.speed)).sum()
        )
    return total


def expected_hypervolume_improvement(
    points: Sequence[Point],
    *,
    reference: Point,
    memory: Array,
    perplexity: Array,
    speed_mean: Array,
    speed_deviation: Array,
) -> Array:
    """Expected growth of the hypervolume by each candidate, [candidate]; its speed is normally distributed."""
    gain = numpy.zeros(len(memory))
    stairs_speeds = numpy.unique([reference.speed, *(point.speed for point in points)])
    improvements = _expected_improvement(speed_mean, speed_deviation, stairs_speeds)
    for level in _levels(
        [*points, *(_at(reference, p) for p in numpy.unique(perplexity))], reference
    ):
        (there,) = numpy.nonzero(perplexity <= level.lower_end)
        stairs = _staircase(points, level.upper_end, reference)
        left = numpy.maximum(stairs.left[None, :], memory[there, None])
        width = numpy.clip(stairs.right[None, :] - left, 0.0, None)
        improvement = improvements[
            numpy.ix_(there, numpy.searchsorted(stairs_speeds, stairs.speed))
        ]
        gain[there] += level.height * (width * improvement).sum(axis=1)
    return gain


@dataclass(frozen=True, kw_only=True)
class _Level:
    """Perplexities between two neighbours among those seen."""

    lower_end: float
    upper_end: float

    @property
    def height(self) -> float:
        return self.upper_end - self.lower_end


def _levels(points: Sequence[Point], reference: Point) -> list[_Level]:
    ends = sorted({point.perplexity for point in points if point.perplexity < reference.perplexity})
    return [
        _Level(lower_end=a, upper_end=b)
        for a, b in itertools.pairwise([*ends, reference.perplexity])
    ]


@dataclass(frozen=True, kw_only=True)
class _Stairs:
    """Between two amounts of memory, the best speed that is had with the lower one; [stair] each."""

    left: Array
    right: Array
    speed: Array


def _staircase(points: Sequence[Point], below_perplexity: float, reference: Point) -> _Stairs:
    """Of the points that are better than `below_perplexity`, from no memory up to the reference's."""
    within = sorted(
        (point.memory, point.speed)
        for point in points
        if point.perplexity < below_perplexity
        and point.memory < reference.memory
        and point.speed > reference.speed
    )
    left, speed = [-math.inf], [reference.speed]
    for memory, best in within:
        if best > speed[-1]:
            left.append(memory)
            speed.append(best)
    left[0] = 0.0
    return _Stairs(
        left=numpy.array(left),
        right=numpy.array([*left[1:], reference.memory]),
        speed=numpy.array(speed),
    )


def _at(reference: Point, perplexity: float) -> Point:
    """A level's place holder, which dominates nothing."""
    return Point(memory=reference.memory, speed=reference.speed, perplexity=float(perplexity))


def _expected_improvement(mean: Array, deviation: Array, speeds: Array) -> Array:
    """E[max(0, speed - s)] for each candidate and each s of `speeds`, [candidate, speed]."""
    above = mean[:, None] - speeds[None, :]
    spread = numpy.maximum(deviation, 1e-12)[:, None]
    ratio = above / spread
    # Far below, the two terms cancel but for rounding.
    return numpy.maximum(above * normal_cdf(ratio) + spread * normal_density(ratio), 0.0)


def normal_density(values: Array) -> Array:
    return numpy.asarray(numpy.exp(-0.5 * values**2) / math.sqrt(2 * math.pi))


def normal_cdf(values: Array) -> Array:
    """numpy has no error function; the standard library's, value by value, wherever it can differ from 0 and 1."""
    result = numpy.where(values > 0.0, 1.0, 0.0)
    between = (values > -_SURELY_BELOW) & (values < _SURELY_ABOVE)
    result[between] = 0.5 * numpy.array(
        [*map(math.erfc, (-values[between] / math.sqrt(2)).tolist())]
    )
    return result
