"""Surrogate model: a Gaussian process that predicts untried configurations from the trials.

The kernel is additive (Duvenaud, Nickisch and Rasmussen, "Additive Gaussian processes", NeurIPS
2011), with a constant, one term for each technique and one for each pair of techniques:

    k(x, x') = technique^2 * (1 + sum_i c_i) + pair^2 * sum_{i<j} c_i c_j
    c_i = 1 where x and x' have the same value of technique i, else 0
    c_i = exp(-((x_i - x'_i) / length_i)^2 / 2) for the ordered techniques

Techniques multiply memory and time by a factor, so the process is fitted to logarithms. Its scales
(technique, pair, noise) are those of a small grid with the largest posterior density. The mean and
variance are those of Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006,
algorithm 2.1; what does not depend on x_test is computed once.
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
"""How many values are used at most, in all and to choose the scales: the time of a fit grows with
the third power of their number. Of more values the first are used, so callers put those that matter
first (`training_subset.py`)."""

_TECHNIQUE_SCALES = (0.02, 0.06, 0.2, 0.6)
"""Standard deviation of the effect of one technique, in natural logarithms: 0.2 is a fifth more or
less."""
_USUAL_SCALE, _SCALE_SPREAD = 0.2, 0.7
"""Median and standard deviation (of the logarithm) of a prior over the technique scale: a few
similar results do not show that techniques have no effect."""
_PAIR_SHARES = (0.1, 0.3, 0.6)
"""Standard deviation of the interaction of a pair, relative to that of a technique."""
_ORDERED_LENGTHS = {BUDGET: 0.3, MICRO_BATCH: 1.5}
"""Length scales of the ordered techniques; that of the micro batch is in doublings."""
_JITTER = 1e-8
"""Added to the diagonal, so that the covariance stays positive definite in floats."""


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """Expected logarithm and its standard deviation, each [configuration of x_test]."""

    mean: Array
    deviation: Array


def posterior(
    x_test: Sequence[TrainingConfig],
    *,
    x_train: Sequence[TrainingConfig],
    y_train: Sequence[float],
    noises: Sequence[float],
) -> Posterior:
    """Return the posterior for `x_test`, given the logarithms `y_train` measured for `x_train`.

    `noises` are the standard deviations of the measurements to choose from.
    """
    surrogate = Surrogate(features_of(x_train[:MOST_SEEN]), y_train[:MOST_SEEN], noises=noises)
    return surrogate.predict(features_of(x_test))


class Surrogate:
    """A Gaussian process fitted to logarithms; configurations are rows of `features_of`."""

    def __init__(
        self, x_train: Array, y_train: Sequence[float], *, noises: Sequence[float]
    ) -> None:
        values = numpy.array(y_train[:MOST_SEEN], dtype=float)
        self._x_train = x_train[:MOST_SEEN]
        self._noises = noises
        self._center = float(values.mean())
        self._residuals = values - self._center
        self._fits: dict[tuple[int, ...], _Fit] = {}

    def predict(self, x_test: Array) -> Posterior:
        fit, similarity = self._fit_for(x_test)
        return Posterior(
            mean=fit.mean(similarity) + self._center, deviation=fit.deviation(similarity)
        )

    def predict_mean(self, x_test: Array) -> Array:
        """Return the mean of `predict` alone, at half of the cost."""
        fit, similarity = self._fit_for(x_test)
        return fit.mean(similarity) + self._center

    def _fit_for(self, x_test: Array) -> "tuple[_Fit, _Similarity]":
        """Return the fit over the techniques that differ anywhere in x_train or x_test."""
        lowest = numpy.minimum(self._x_train.min(axis=0), x_test.min(axis=0))
        highest = numpy.maximum(self._x_train.max(axis=0), x_test.max(axis=0))
        fields = tuple(int(field) for field in numpy.flatnonzero(lowest < highest))
        if fields not in self._fits:
            self._fits[fields] = self._fit(fields)
        return self._fits[fields], _Similarity.between(x_test, self._x_train, fields=fields)

    def _fit(self, fields: tuple[int, ...]) -> "_Fit":
        """Choose the scales by the first configurations, then fit all of them."""
        first = self._x_train[:MOST_FOR_SCALES]
        similarity = _Similarity.between(first, first, fields=fields)
        fits = []
        for technique, pair_share, noise in itertools.product(
            _TECHNIQUE_SCALES, _PAIR_SHARES, self._noises
        ):
            scales = _Scales(technique=technique, pair=technique * pair_share, noise=noise)
            fits.append(_Fit(similarity, self._residuals[: len(first)], scales=scales))
        best = max(fits, key=lambda fit: fit.log_posterior)
        if len(self._x_train) > MOST_FOR_SCALES:
            similarity = _Similarity.between(self._x_train, self._x_train, fields=fields)
            best = _Fit(similarity, self._residuals, scales=best.scales)
        return best


@dataclass(frozen=True, kw_only=True)
class _Similarity:
    """The two sums of the kernel, each [row, column]: sum_i c_i and sum_{i<j} c_i c_j."""

    singles: Array
    pairs: Array

    @classmethod
    def between(cls, rows: Array, columns: Array, *, fields: Sequence[int]) -> "_Similarity":
        equal = numpy.zeros((len(rows), len(columns)), dtype=numpy.int8)
        for field in fields:
            if field not in _ORDERED_LENGTHS:
                equal += rows[:, None, field] == columns[None, :, field]
        singles = equal.astype(float)
        squares = equal.astype(float)
        for field, length in _ORDERED_LENGTHS.items():
            if field in fields:
                layer = _closeness(rows[:, field], columns[:, field], length=length)
                singles += layer
                squares += layer**2
        # sum_{i<j} c_i c_j = ((sum_i c_i)^2 - sum_i c_i^2) / 2
        return cls(singles=singles, pairs=(singles**2 - squares) / 2)


def _closeness(rows: Array, columns: Array, *, length: float) -> Array:
    """Return exp(-((row - column) / length)^2 / 2), [row, column].

    There are few distinct values, so it is computed once for each pair of them.
    """
    row_values, row_indices = numpy.unique(rows, return_inverse=True)
    column_values, column_indices = numpy.unique(columns, return_inverse=True)
    distance = (row_values[:, None] - column_values[None, :]) / length
    return numpy.asarray(numpy.exp(-0.5 * distance**2)[row_indices][:, column_indices])


@dataclass(frozen=True, kw_only=True)
class _Scales:
    """Standard deviations of the kernel's terms and of the measurements, in logarithms."""

    technique: float
    pair: float
    noise: float


class _Fit:
    """The Gaussian process with one choice of scales."""

    def __init__(self, similarity: _Similarity, residuals: Array, *, scales: _Scales) -> None:
        self.scales = scales
        covariance = self._kernel(similarity)
        self._prior_variance = float(covariance[0, 0])
        self._root = numpy.linalg.cholesky(
            covariance + (scales.noise**2 + _JITTER) * numpy.eye(len(residuals))
        )
        self._whitened = numpy.linalg.solve(self._root, residuals)
        log_determinant = 2 * float(numpy.log(numpy.diag(self._root)).sum())
        # Up to a constant: -(y' K^-1 y + log |K| + squared distance of the prior) / 2
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

    def mean(self, similarity: _Similarity) -> Array:
        """Return k(x_test, x_train) K^-1 y, [configuration of x_test]."""
        return numpy.asarray(self._kernel(similarity) @ self._weights)

    def deviation(self, similarity: _Similarity) -> Array:
        """Return sqrt(k(x, x) - k(x, x_train) K^-1 k(x_train, x)), [configuration of x_test]."""
        explained = self._inverse_root @ self._kernel(similarity).T
        variance = self._prior_variance - numpy.einsum("ij,ij->j", explained, explained)
        return numpy.asarray(numpy.sqrt(numpy.maximum(variance, 0.0)))

    def _kernel(self, similarity: _Similarity) -> Array:
        single_terms = self.scales.technique**2 * (1 + similarity.singles)
        pair_terms = self.scales.pair**2 * similarity.pairs
        return numpy.asarray(single_terms + pair_terms)
