"""What the trials so far say of the configurations not tried: a Gaussian process over techniques and pairs of them.

The kernel is additive: a constant, one term a technique, one a pair of techniques (Duvenaud et al., "Additive Gaussian
processes", NeurIPS 2011). Techniques multiply memory and time by a factor, so it is fitted to logarithms. Its scales
are the most probable of a small grid, given the values seen.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from autotune.config import FIELD_ORDER, TrainingConfig

Array = NDArray[numpy.float64]

MOST_SEEN, MOST_FOR_SCALES = 300, 100
"""Of more values the first are used, in all and to find the scales: a fit's time grows with their third power."""

_TECHNIQUE_SCALES = (0.02, 0.06, 0.2, 0.6)
"""Standard deviation of a technique's own effect, in natural logarithms: 0.2 is a fifth more or less."""
_USUAL_SCALE, _SCALE_SPREAD = 0.2, 0.7
"""A log-normal prior over the scales: a few trials that came out alike do not show that techniques have no effect."""
_PAIR_SHARES = (0.1, 0.3, 0.6)
"""Standard deviation of what a pair does beyond its parts, relative to that of a technique."""
_ORDERED_LENGTHS = {"memory_budget": 0.3, "micro_batch_size": 1.5}
"""How far apart two values of an ordered technique still say something of each other; a micro batch's in doublings."""
_JITTER = 1e-8


@dataclass(frozen=True, kw_only=True)
class Belief:
    """Of each configuration asked about: the expected logarithm and its standard deviation."""

    mean: Array
    deviation: Array


def believe(
    asked: Sequence[TrainingConfig],
    *,
    seen: Sequence[TrainingConfig],
    logarithms: Sequence[float],
    noises: Sequence[float],
) -> Belief:
    """What `logarithms`, measured of `seen` with the likeliest standard deviation of `noises`, say of `asked`."""
    seen, values = seen[:MOST_SEEN], numpy.array(logarithms[:MOST_SEEN], dtype=float)
    fields = [field for field in FIELD_ORDER if len({getattr(config, field) for config in [*seen, *asked]}) > 1]
    center = float(values.mean())
    fits = _fits(seen[:MOST_FOR_SCALES], values[:MOST_FOR_SCALES] - center, fields=fields, noises=noises)
    best = max(fits, key=lambda fit: fit.log_posterior)
    if len(seen) > MOST_FOR_SCALES:
        best = _Fit(_Alike.of(seen, seen, fields=fields), values - center, scales=best.scales)
    mean, deviation = best.posterior(_Alike.of(asked, seen, fields=fields))
    return Belief(mean=mean + center, deviation=deviation)


def _fits(
    seen: Sequence[TrainingConfig], residuals: Array, *, fields: Sequence[str], noises: Sequence[float]
) -> "list[_Fit]":
    alike = _Alike.of(seen, seen, fields=fields)
    grid = itertools.product(_TECHNIQUE_SCALES, _PAIR_SHARES, noises)
    return [_Fit(alike, residuals, scales=_Scales(technique=t, pair=t * share, noise=n)) for t, share, n in grid]


@dataclass(frozen=True, kw_only=True)
class _Alike:
    """How alike configurations are, [one, other]: summed over techniques, and over pairs of techniques."""

    singles: Array
    pairs: Array

    @classmethod
    def of(cls, ones: Sequence[TrainingConfig], others: Sequence[TrainingConfig], *, fields: Iterable[str]) -> "_Alike":
        singles, squares = numpy.zeros((2, len(ones), len(others)))
        for field in fields:
            layer = _similarity(field, ones, others)
            singles += layer
            squares += layer**2
        return cls(singles=singles, pairs=(singles**2 - squares) / 2)


def _similarity(field: str, ones: Sequence[TrainingConfig], others: Sequence[TrainingConfig]) -> Array:
    """[one, other]: 1 where values are the same, 0 where they differ, between where they have an order."""
    mine, theirs = ([getattr(config, field) for config in side] for side in (ones, others))
    if field in _ORDERED_LENGTHS:
        places = [numpy.array(side, dtype=float) for side in (mine, theirs)]
        if field == "micro_batch_size":
            places = [numpy.log2(side) for side in places]
        apart = (places[0][:, None] - places[1][None, :]) / _ORDERED_LENGTHS[field]
        return numpy.asarray(numpy.exp(-0.5 * apart**2))
    codes: dict[Any, int] = {value: code for code, value in enumerate(dict.fromkeys([*mine, *theirs]))}
    one, other = (numpy.array([codes[value] for value in side]) for side in (mine, theirs))
    return numpy.asarray(one[:, None] == other[None, :], dtype=float)


@dataclass(frozen=True, kw_only=True)
class _Scales:
    """Standard deviations, in logarithms."""

    technique: float
    pair: float
    noise: float


class _Fit:
    """The process under one choice of scales."""

    def __init__(self, alike: _Alike, residuals: Array, *, scales: _Scales) -> None:
        self.scales = scales
        covariance = self._kernel(alike) + (scales.noise**2 + _JITTER) * numpy.eye(len(residuals))
        self._prior_variance = float(self._kernel(alike)[0, 0])
        self._root = numpy.linalg.cholesky(covariance)
        whitened = numpy.linalg.solve(self._root, residuals)
        self._weights = numpy.linalg.solve(self._root.T, whitened)
        log_determinant = 2 * float(numpy.log(numpy.diag(self._root)).sum())
        prior = (math.log(scales.technique / _USUAL_SCALE) / _SCALE_SPREAD) ** 2
        self.log_posterior = -0.5 * (float(whitened @ whitened) + log_determinant + prior)

    def posterior(self, alike: _Alike) -> tuple[Array, Array]:
        covariance = self._kernel(alike)
        explained = numpy.linalg.solve(self._root, covariance.T)
        variance = self._prior_variance - numpy.einsum("ij,ij->j", explained, explained)
        return covariance @ self._weights, numpy.sqrt(numpy.maximum(variance, 0.0))

    def _kernel(self, alike: _Alike) -> Array:
        return numpy.asarray(self.scales.technique**2 * (1 + alike.singles) + self.scales.pair**2 * alike.pairs)
