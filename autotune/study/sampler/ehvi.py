"""Expected hypervolume improvement of configurations with known memory, perplexity; unknown speed.

With memory m and perplexity p known and speed normally distributed, the expectation has a closed
form. The dominated volume is a stack of slices, one for each level of perplexity, and each slice is
a staircase over memory, which gives the best speed to be had with so much memory:

    EHVI(m, p) = sum over levels l above p of  height(l)
                 * sum over stairs j of l of  width(j, above m) * EI(speed(j))
    EI(s) = E[max(0, speed - s)] = (mean - s) * Phi(z) + deviation * phi(z),
            z = (mean - s) / deviation

EI is the expected improvement of Jones, Schonlau and Welch, "Efficient global optimization of
expensive black-box functions", 1998. EHVI is from Emmerich, Giannakoglou and Naujoks, "Single- and
multiobjective evolutionary optimization assisted by Gaussian random field metamodels", 2006.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

Array = NDArray[numpy.float64]

_CDF_IS_0_BELOW, _CDF_IS_1_ABOVE = 39.0, 9.0
"""Distance from the mean, in standard deviations, from which the normal cumulative distribution
function is exactly 0 and 1 in a float."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Objectives of a trial, in any units: smaller memory and perplexity and larger speed win."""

    memory: float
    speed: float
    perplexity: float


def not_dominated(points: Sequence[Point]) -> list[Point]:
    """Returns the points that no other equals or beats in all objectives.

    Of equal points the first is returned.
    """
    rows = numpy.array([(point.memory, point.speed, point.perplexity) for point in points]).reshape(
        len(points), 3
    )
    return [points[index] for index in indices_not_dominated(*rows.T)]


def indices_not_dominated(memory: Array, speed: Array, perplexity: Array) -> list[int]:
    """Returns the indices of the points that are not dominated, in the order of their memory.

    Each pass takes the remaining point of least memory and drops all that it dominates.
    """
    remaining = numpy.lexsort((perplexity, -speed, memory))
    front = []
    while len(remaining):
        first = remaining[0]
        front.append(int(first))
        is_faster = speed[remaining] > speed[first]
        is_better = perplexity[remaining] < perplexity[first]
        remaining = remaining[is_faster | is_better]
    return front


def hypervolume(points: Sequence[Point], *, reference: Point) -> float:
    """Returns the volume between `points` and `reference` that the points dominate."""
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
    """Returns the expected growth of the hypervolume by each candidate, [candidate].

    `memory`, `perplexity`, `speed_mean` and `speed_deviation` are [candidate]; the speed of a
    candidate is normally distributed. The formula is at the top of the module.
    """
    improvement = numpy.zeros(len(memory))
    stair_speeds = numpy.unique([reference.speed, *(point.speed for point in points)])
    speed_improvements = _expected_improvement(speed_mean, speed_deviation, stair_speeds)
    # A candidate's perplexity splits a level: only the part above it counts for the candidate.
    splits = [_split_at(value, reference) for value in numpy.unique(perplexity)]
    for level in _levels([*points, *splits], reference):
        (below,) = numpy.nonzero(perplexity <= level.lower_end)
        stairs = _staircase(points, level.upper_end, reference)
        left = numpy.maximum(stairs.left[None, :], memory[below, None])
        width = numpy.clip(stairs.right[None, :] - left, 0.0, None)
        columns = numpy.searchsorted(stair_speeds, stairs.speed)
        above_stair = speed_improvements[numpy.ix_(below, columns)]
        improvement[below] += level.height * (width * above_stair).sum(axis=1)
    return improvement


@dataclass(frozen=True, kw_only=True)
class _Level:
    """A range of perplexity between two neighbouring values of the points."""

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
    """The best speed to be had with memory between `left` and `right`, each [stair]."""

    left: Array
    right: Array
    speed: Array


def _staircase(points: Sequence[Point], below_perplexity: float, reference: Point) -> _Stairs:
    """Returns the staircase of the points below a perplexity, from no memory to the reference's."""
    candidates = sorted(
        (point.memory, point.speed)
        for point in points
        if point.perplexity < below_perplexity
        and point.memory < reference.memory
        and point.speed > reference.speed
    )
    left, speed = [-math.inf], [reference.speed]
    for point_memory, point_speed in candidates:
        if point_speed > speed[-1]:
            left.append(point_memory)
            speed.append(point_speed)
    left[0] = 0.0
    return _Stairs(
        left=numpy.array(left),
        right=numpy.array([*left[1:], reference.memory]),
        speed=numpy.array(speed),
    )


def _split_at(perplexity: float, reference: Point) -> Point:
    """Returns a point that ends a level at `perplexity` and dominates nothing."""
    return Point(memory=reference.memory, speed=reference.speed, perplexity=float(perplexity))


def _expected_improvement(mean: Array, deviation: Array, speeds: Array) -> Array:
    """Returns E[max(0, speed - s)] for each candidate and s of `speeds`, [candidate, speed]."""
    above = mean[:, None] - speeds[None, :]
    spread = numpy.maximum(deviation, 1e-12)[:, None]
    ratio = above / spread
    # Far below s the two terms cancel, and rounding may leave less than 0.
    return numpy.maximum(above * normal_cdf(ratio) + spread * normal_density(ratio), 0.0)


def normal_density(values: Array) -> Array:
    return numpy.asarray(numpy.exp(-0.5 * values**2) / math.sqrt(2 * math.pi))


def normal_cdf(values: Array) -> Array:
    """Returns Phi of each value, erfc(-value / sqrt(2)) / 2.

    numpy has no error function, so the standard library's is called value by value, but only where
    the result can differ from 0 and 1.
    """
    result = numpy.where(values > 0.0, 1.0, 0.0)
    between = (values > -_CDF_IS_0_BELOW) & (values < _CDF_IS_1_ABOVE)
    result[between] = 0.5 * numpy.array(
        [*map(math.erfc, (-values[between] / math.sqrt(2)).tolist())]
    )
    return result
