"""What the trials so far say of the configurations not tried: a Gaussian process over techniques and pairs of them.

The kernel is additive: a constant, one term a technique, one a pair of techniques (Duvenaud et al.,
"Additive Gaussian processes", NeurIPS 2011). Techniques multiply memory and time by a factor, so it
is fitted to logarithms. Its scales are the most probable of a small grid, given the values seen. It
may be asked many times: what does not depend on the question is worked out once.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy

from autotune.spec.config import TrainingConfig
from autotune.study.sampler.features import BUDGET, MICRO_BATCH, Array, features_of

MOST_SEEN, MOST_FOR_SCALES = 300, 100
"""Of more values the first are used, in all and to find the scales: a fit's time grows with their
third power. Who has more puts first what matters (`training_subset.py`)."""

_TECHNIQUE_SCALES = (0.02, 0.06, 0.2, 0.6)
"""Standard deviation of a technique's own effect, in natural logarithms: 0.2 is a fifth more or
less."""
_USUAL_SCALE, _SCALE_SPREAD = 0.2, 0.7
"""A log-normal prior over the scales: a few trials that came out alike do not show that techniques
have no effect."""
_PAIR_SHARES = (0.1, 0.3, 0.6)
"""Standard deviation of what a pair does beyond its parts, relative to that of a technique."""
_ORDERED_LENGTHS = {BUDGET: 0.3, MICRO_BATCH: 1.5}
"""How far apart two values of an ordered technique still say something of each other; a micro
batch's in doublings."""
_JITTER = 1e-8


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """Of each configuration asked about: the expected logarithm and its standard deviation."""

    mean: Array
    deviation: Array


def posterior(
    asked: Sequence[TrainingConfig],
    *,
    seen: Sequence[TrainingConfig],
    logarithms: Sequence[float],
    noises: Sequence[float],
) -> Posterior:
    """What `logarithms`, measured of `seen` with the likeliest standard deviation of `noises`, say of `asked`."""
    return Surrogate(features_of(seen[:MOST_SEEN]), logarithms[:MOST_SEEN], noises=noises).of(
        features_of(asked)
    )


class Surrogate:
    """The process after so many values; configurations are rows of `features_of`."""

    def __init__(
        self, seen: Array, logarithms: Sequence[float], *, noises: Sequence[float]
    ) -> None:
        values = numpy.array(logarithms[:MOST_SEEN], dtype=float)
        self._seen, self._noises = seen[:MOST_SEEN], noises
        self._center = float(values.mean())
        self._residuals = values - self._center
        self._fits: dict[tuple[int, ...], _Fit] = {}

    def of(self, asked: Array) -> Posterior:
        fit, alike = self._for(asked)
        return Posterior(mean=fit.mean(alike) + self._center, deviation=fit.deviation(alike))

    def mean_of(self, asked: Array) -> Array:
        """What `of` expects, at half of its cost."""
        fit, alike = self._for(asked)
        return fit.mean(alike) + self._center

    def _for(self, asked: Array) -> "tuple[_Fit, _Alike]":
        """Only techniques that differ somewhere, among the seen or the asked, tell configurations apart."""
        lowest = numpy.minimum(self._seen.min(axis=0), asked.min(axis=0))
        highest = numpy.maximum(self._seen.max(axis=0), asked.max(axis=0))
        fields = tuple(int(field) for field in numpy.flatnonzero(lowest < highest))
        if fields not in self._fits:
            self._fits[fields] = self._fitted(fields)
        return self._fits[fields], _Alike.of(asked, self._seen, fields=fields)

    def _fitted(self, fields: tuple[int, ...]) -> "_Fit":
        few = self._seen[:MOST_FOR_SCALES]
        alike = _Alike.of(few, few, fields=fields)
        grid = itertools.product(_TECHNIQUE_SCALES, _PAIR_SHARES, self._noises)
        scales = [_Scales(technique=t, pair=t * share, noise=n) for t, share, n in grid]
        best = max(
            (_Fit(alike, self._residuals[: len(few)], scales=s) for s in scales),
            key=lambda f: f.log_posterior,
        )
        if len(self._seen) > MOST_FOR_SCALES:
            best = _Fit(
                _Alike.of(self._seen, self._seen, fields=fields),
                self._residuals,
                scales=best.scales,
            )
        return best


@dataclass(frozen=True, kw_only=True)
class _Alike:
    """How alike configurations are, [one, other]: summed over techniques, and over pairs of techniques."""

    singles: Array
    pairs: Array

    @classmethod
    def of(cls, ones: Array, others: Array, *, fields: Sequence[int]) -> "_Alike":
        equal = numpy.zeros((len(ones), len(others)), dtype=numpy.int8)
        for field in fields:
            if field not in _ORDERED_LENGTHS:
                equal += ones[:, None, field] == others[None, :, field]
        singles, squares = equal.astype(float), equal.astype(float)
        for field, length in _ORDERED_LENGTHS.items():
            if field in fields:
                layer = _closeness(ones[:, field], others[:, field], length=length)
                singles += layer
                squares += layer**2
        return cls(singles=singles, pairs=(singles**2 - squares) / 2)


def _closeness(ones: Array, others: Array, *, length: float) -> Array:
    """[one, other]: 1 where values are the same, less the further apart they are.

    There are few values.
    """
    mine, my_places = numpy.unique(ones, return_inverse=True)
    theirs, their_places = numpy.unique(others, return_inverse=True)
    apart = (mine[:, None] - theirs[None, :]) / length
    return numpy.asarray(numpy.exp(-0.5 * apart**2)[my_places][:, their_places])


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
        covariance = self._kernel(alike)
        self._prior_variance = float(covariance[0, 0])
        self._root = numpy.linalg.cholesky(
            covariance + (scales.noise**2 + _JITTER) * numpy.eye(len(residuals))
        )
        self._whitened = numpy.linalg.solve(self._root, residuals)
        log_determinant = 2 * float(numpy.log(numpy.diag(self._root)).sum())
        prior = (math.log(scales.technique / _USUAL_SCALE) / _SCALE_SPREAD) ** 2
        self.log_posterior = -0.5 * (
            float(self._whitened @ self._whitened) + log_determinant + prior
        )

    @cached_property
    def _weights(self) -> Array:
        return numpy.asarray(numpy.linalg.solve(self._root.T, self._whitened))

    @cached_property
    def _inverse_root(self) -> Array:
        return numpy.asarray(numpy.linalg.inv(self._root))

    def mean(self, alike: _Alike) -> Array:
        return numpy.asarray(self._kernel(alike) @ self._weights)

    def deviation(self, alike: _Alike) -> Array:
        explained = self._inverse_root @ self._kernel(alike).T
        variance = self._prior_variance - numpy.einsum("ij,ij->j", explained, explained)
        return numpy.asarray(numpy.sqrt(numpy.maximum(variance, 0.0)))

    def _kernel(self, alike: _Alike) -> Array:
        return numpy.asarray(
            self.scales.technique**2 * (1 + alike.singles) + self.scales.pair**2 * alike.pairs
        )
