"""Surrogate model: a Gaussian process that predicts untried configurations from the trials.

The kernel is additive (Duvenaud, Nickisch and Rasmussen, "Additive Gaussian processes", NeurIPS
2011), with a constant, one term for each technique and one for each pair of techniques:

    k(x, x') = constant^2 + sum_i s_i^2 c_i + pair^2 * sum_{i<j} s_i c_i s_j c_j
    c_i = 1 where x and x' have the same value of technique i, else 0
    c_i = exp(-((x_i - x'_i) / length_i)^2 / 2) for the ordered techniques

Techniques multiply memory and time by a factor, so the process is fitted to logarithms. Its scales
(one s for all techniques, pair, noise) are those of a small grid with the largest posterior
density. What is measured without noise shows how much each technique matters: then, from there,
each technique gets its own s_i as long as that raises the density (automatic relevance
determination, section 5.1 of the book below). The mean and variance are those of Rasmussen and
Williams, "Gaussian Processes for Machine Learning", 2006, algorithm 2.1; what does not depend on
x_test is computed once.

Where something is known beforehand, as by a roofline, the process has a mean, and describes what
is left (section 2.7 of the book):

    mean(x) = center + weight * expectation(x)

with the expectation in a further column of the features (`with_expectation`), and the weight from
the same grid: 1 where the measurements follow it, 0 where they do not.
"""

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy

from autotune.spec.config import TrainingConfig
from autotune.study.sampler.features import (
    BUDGET,
    EXPECTATION,
    LOGARITHMIC,
    TECHNIQUE_WEIGHTS,
    Array,
    features_of,
)

MOST_SEEN, MOST_FOR_SCALES = 300, 100
"""How many values are used at most, in all and to choose the scales: the time of a fit grows with
the third power of their number. Of more values the first are used, so callers put those that matter
first (`training_subset.py`)."""

_TECHNIQUE_SCALES = (0.02, 0.06, 0.2, 0.6)
"""Standard deviation of the effect of one technique, in natural logarithms: 0.2 is a fifth more or
less."""
_USUAL_SCALE, _SCALE_SPREAD = 0.2, 0.7
"""Median and standard deviation (of the logarithm) of a prior over the one scale of all techniques:
a few similar results do not show that techniques have no effect."""
_USUAL_SCALE_OF_ONE, _SCALE_SPREAD_OF_ONE = 0.15, 1.0
"""The same for the scale of each one, where they differ."""
_SWEEPS = 2
"""How often each technique's scale is tried anew."""
_PAIR_SHARES = (0.1, 0.3, 0.6)
"""Standard deviation of the interaction of a pair, relative to the geometric mean of those of its
two techniques."""
_EXPECTATION_WEIGHTS, _USUAL_WEIGHT, _WEIGHT_SPREAD = (0.0, 0.5, 1.0), 1.0, 0.5
"""Weights of an expectation to choose from, and mean and standard deviation of a prior over them.
"""
_ORDERED_LENGTHS = {BUDGET: 0.3, **dict.fromkeys(LOGARITHMIC, 1.5)}
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
    """Returns the posterior for `x_test`, given the logarithms `y_train` measured for `x_train`.

    `noises` are the standard deviations of the measurements to choose from.
    """
    surrogate = Surrogate(features_of(x_train[:MOST_SEEN]), y_train[:MOST_SEEN], noises=noises)
    return surrogate.predict(features_of(x_test))


class Surrogate:
    """A Gaussian process fitted to logarithms; configurations are rows of `features_of`."""

    def __init__(
        self,
        x_train: Array,
        y_train: Sequence[float],
        *,
        noises: Sequence[float],
        has_own_scales: bool = False,
    ) -> None:
        """`has_own_scales`: each technique has its own scale, for values that hardly scatter."""
        self._x_train = x_train[:MOST_SEEN]
        self._y_train = numpy.array(y_train[:MOST_SEEN], dtype=float)
        self._noises = noises
        self._has_own_scales = has_own_scales
        self._fits: dict[tuple[int, ...], _Fit] = {}
        self._measured: Surrogate | None = None
        """The process that the scales come from, if not from this one's own values."""

    def believing(self, x_more: Array, y_more: Array) -> "Surrogate":
        """Returns the process with further values that are only expected.

        They take part in the mean and the variance, but not in the choice of the scales: values
        that agree with the model would make it too certain.
        """
        more = copy.copy(self)
        more._x_train = numpy.concatenate([self._x_train, x_more])
        more._y_train = numpy.concatenate([self._y_train, y_more])
        more._fits = {}
        more._measured = self
        return more

    def one_by_one(self, x_test: Array) -> "PosteriorOneByOne":
        """Returns the posterior at `x_test`, whose rows can be believed one after the other.

        If there is a fit over more techniques, as of more configurations than these, it is of that.
        """
        fields = self._fields_of(x_test)
        larger = [known for known in self._fits if {*known} >= {*fields}]
        fields = max(larger, key=len, default=fields)
        fit, covariance = self._fit_over(fields, x_test)
        return PosteriorOneByOne(
            x_test,
            mean=fit.mean(covariance, x_test),
            explained=fit.explained(covariance),
            fields=fields,
            fit=fit,
        )

    def predict(self, x_test: Array) -> Posterior:
        fit, covariance = self._fit_for(x_test)
        return Posterior(mean=fit.mean(covariance, x_test), deviation=fit.deviation(covariance))

    def predict_mean(self, x_test: Array) -> Array:
        """Returns the mean of `predict` alone, at half of the cost."""
        fit, covariance = self._fit_for(x_test)
        return fit.mean(covariance, x_test)

    def _fit_for(self, x_test: Array) -> "tuple[_Fit, Array]":
        """Returns the fit over the techniques that differ anywhere in x_train or x_test.

        With it the covariance of x_test and x_train, [configuration of x_test, of x_train].
        """
        return self._fit_over(self._fields_of(x_test), x_test)

    def _fit_over(self, fields: tuple[int, ...], x_test: Array) -> "tuple[_Fit, Array]":
        if fields not in self._fits:
            self._fits[fields] = self._fit(fields)
        fit = self._fits[fields]
        return fit, fit.scales.kernel(_Closeness.between(x_test, self._x_train, fields))

    def _fields_of(self, x_test: Array) -> tuple[int, ...]:
        lowest = numpy.minimum(self._x_train.min(axis=0), x_test.min(axis=0))[:EXPECTATION]
        highest = numpy.maximum(self._x_train.max(axis=0), x_test.max(axis=0))[:EXPECTATION]
        # Where nothing differs any field will do.
        return tuple(int(field) for field in numpy.flatnonzero(lowest < highest)) or (0,)

    def _fit(self, fields: tuple[int, ...]) -> "_Fit":
        """Choose the scales by the first configurations, then fit all of them."""
        if self._measured is not None:
            measured = self._measured
            if fields not in measured._fits:
                measured._fits[fields] = measured._fit(fields)
            chosen = measured._fits[fields]
            covariance = _Covariance.of(self._x_train, fields, scales=chosen.scales)
            return _Fit(covariance, self._x_train, self._y_train, mean=chosen.prior_mean)
        x_first, y_first = self._x_train[:MOST_FOR_SCALES], self._y_train[:MOST_FOR_SCALES]
        means = _PriorMean.to_choose_from(x_first, y_first)
        closeness = _Closeness.between(x_first, x_first, fields)
        weights = TECHNIQUE_WEIGHTS[list(fields)]
        fits = []
        for technique, pair, noise in itertools.product(
            _TECHNIQUE_SCALES, _PAIR_SHARES, self._noises
        ):
            techniques = (technique,) * len(fields)
            if len(means) > 1:
                techniques = tuple(technique * weights)
            scales = _Scales(constant=technique, techniques=techniques, pair=pair, noise=noise)
            log_prior = _log_normal(technique, median=_USUAL_SCALE, spread=_SCALE_SPREAD)
            covariance = _Covariance(closeness, scales=scales)
            fits += [
                _Fit(covariance, x_first, y_first, mean=mean, log_prior=log_prior) for mean in means
            ]
        best = max(fits, key=lambda fit: fit.log_posterior)
        if self._has_own_scales:
            best = self._with_own_scales(best, closeness, x_first, y_first)
        if len(self._x_train) > MOST_FOR_SCALES:
            mean = _PriorMean.with_weight(best.prior_mean.weight, self._x_train, self._y_train)
            covariance = _Covariance.of(self._x_train, fields, scales=best.scales)
            best = _Fit(covariance, self._x_train, self._y_train, mean=mean)
        return best

    def _with_own_scales(
        self, chosen: "_Fit", closeness: "_Closeness", x_first: Array, y_first: Array
    ) -> "_Fit":
        """Change one scale at a time, from those of `chosen`, as long as the density rises."""

        def fit_with(scales: _Scales) -> _Fit:
            log_prior = sum(
                _log_normal(scale, median=_USUAL_SCALE_OF_ONE, spread=_SCALE_SPREAD_OF_ONE)
                for scale in scales.techniques
            )
            covariance = _Covariance(closeness, scales=scales)
            return _Fit(covariance, x_first, y_first, mean=chosen.prior_mean, log_prior=log_prior)

        scales = chosen.scales
        best = fit_with(replace(scales, constant=_USUAL_SCALE))
        for _ in range(_SWEEPS):
            before = best
            for index, scale in itertools.product(range(len(scales.techniques)), _TECHNIQUE_SCALES):
                own = list(best.scales.techniques)
                if own[index] != scale:
                    own[index] = scale
                    changed = fit_with(replace(best.scales, techniques=tuple(own)))
                    best = max(best, changed, key=lambda fit: fit.log_posterior)
            for pair in _PAIR_SHARES:
                if pair != best.scales.pair:
                    changed = fit_with(replace(best.scales, pair=pair))
                    best = max(best, changed, key=lambda fit: fit.log_posterior)
            if best is before:
                break
        return best


def _log_normal(value: float, *, median: float, spread: float) -> float:
    """Returns the logarithm of a log-normal density, up to a constant and the factor 1 / value."""
    return -0.5 * (math.log(value / median) / spread) ** 2


@dataclass(frozen=True, kw_only=True)
class _Closeness:
    """c_i of every field for pairs of rows and columns.

    There are few distinct values of a field, so c_i is stored once for each pair of values, and
    rows and columns say which value they have. A weighted sum over the fields is then a product of
    matrices, at a tenth of the cost of one array for each field.
    """

    rows: Array
    """1 where the row has the value, else 0, [row, value of any field]."""
    columns: Array
    """The same, [column, value of any field]."""
    tables: Sequence[Array]
    """c_i of each field, [value, value]."""

    @classmethod
    def between(cls, rows: Array, columns: Array, fields: Sequence[int]) -> "_Closeness":
        tables, of_rows, of_columns = [], [], []
        for field in fields:
            values = numpy.unique(numpy.concatenate([rows[:, field], columns[:, field]]))
            if field in _ORDERED_LENGTHS:
                distance = (values[:, None] - values[None, :]) / _ORDERED_LENGTHS[field]
                tables.append(numpy.exp(-0.5 * distance**2))
            else:
                tables.append(numpy.eye(len(values)))
            of_rows.append(rows[:, field, None] == values[None, :])
            of_columns.append(columns[:, field, None] == values[None, :])
        return cls(
            rows=numpy.concatenate(of_rows, axis=1).astype(float),
            columns=numpy.concatenate(of_columns, axis=1).astype(float),
            tables=tables,
        )

    def sum(self, weights: Array, *, power: int = 1) -> Array:
        """Returns sum_i weight_i c_i^power, [row, column]; one weight for each field."""
        size = self.rows.shape[1]
        table = numpy.zeros((size, size))
        begin = 0
        for weight, of_field in zip(weights, self.tables, strict=True):
            end = begin + len(of_field)
            table[begin:end, begin:end] = weight * of_field**power
            begin = end
        return numpy.asarray((self.rows @ table) @ self.columns.T)


@dataclass(frozen=True, kw_only=True)
class _Scales:
    """Standard deviations of the kernel's terms and of the measurements, in logarithms."""

    constant: float
    techniques: tuple[float, ...]
    """One for each field of the closeness."""
    pair: float
    """Of the interaction of a pair, relative to the geometric mean of the two: its variance is
    pair^2 s_i s_j."""
    noise: float

    def kernel(self, closeness: _Closeness) -> Array:
        """Returns k, [row, column]."""
        scales = numpy.array(self.techniques)
        singles = closeness.sum(scales**2)
        # sum_{i<j} a_i a_j = ((sum_i a_i)^2 - sum_i a_i^2) / 2
        sums = closeness.sum(scales)
        squares = closeness.sum(scales**2, power=2)
        return numpy.asarray(self.constant**2 + singles + self.pair**2 * (sums**2 - squares) / 2)


@dataclass(frozen=True, kw_only=True)
class _PriorMean:
    """What the process expects before any measurement: center + weight * expectation."""

    center: float
    weight: float

    @classmethod
    def with_weight(cls, weight: float, x_train: Array, y_train: Array) -> "_PriorMean":
        """Returns the one with this weight whose center is that of the measurements."""
        left = y_train
        if weight:
            left = y_train - weight * x_train[:, EXPECTATION]
        return cls(center=float(left.mean()), weight=weight)

    @classmethod
    def to_choose_from(cls, x_train: Array, y_train: Array) -> "list[_PriorMean]":
        weights = _EXPECTATION_WEIGHTS if x_train.shape[1] > EXPECTATION else (0.0,)
        return [cls.with_weight(weight, x_train, y_train) for weight in weights]

    def at(self, x: Array) -> Array | float:
        """Returns the mean of each row of features."""
        if not self.weight:
            return self.center
        return numpy.asarray(self.center + self.weight * x[:, EXPECTATION])


class _Covariance:
    """The factorized covariance of what is measured, L L' = k(x_train, x_train) + noise^2."""

    def __init__(self, closeness: _Closeness, *, scales: _Scales) -> None:
        self.scales = scales
        covariance = scales.kernel(closeness)
        self.prior_variance = float(covariance[0, 0])
        self.root = numpy.linalg.cholesky(
            covariance + (scales.noise**2 + _JITTER) * numpy.eye(len(covariance))
        )
        self.log_determinant = 2 * float(numpy.log(numpy.diag(self.root)).sum())

    @classmethod
    def of(cls, x_train: Array, fields: tuple[int, ...], *, scales: _Scales) -> "_Covariance":
        return cls(_Closeness.between(x_train, x_train, fields), scales=scales)


class _Fit:
    """The Gaussian process with one choice of scales and prior mean."""

    def __init__(
        self,
        covariance: _Covariance,
        x_train: Array,
        y_train: Array,
        *,
        mean: _PriorMean,
        log_prior: float = 0.0,
    ) -> None:
        self.scales = covariance.scales
        self.prior_mean = mean
        self.prior_variance = covariance.prior_variance
        self._root = covariance.root
        self._whitened = numpy.linalg.solve(self._root, y_train - mean.at(x_train))
        if x_train.shape[1] > EXPECTATION:
            log_prior -= 0.5 * ((mean.weight - _USUAL_WEIGHT) / _WEIGHT_SPREAD) ** 2
        # Up to a constant: -(y' K^-1 y + log |K|) / 2 + log prior
        self.log_posterior = log_prior - 0.5 * (
            float(self._whitened @ self._whitened) + covariance.log_determinant
        )

    @cached_property
    def _weights(self) -> Array:
        return numpy.asarray(numpy.linalg.solve(self._root.T, self._whitened))

    @cached_property
    def _inverse_root(self) -> Array:
        return numpy.asarray(numpy.linalg.inv(self._root))

    def mean(self, covariance: Array, x_test: Array) -> Array:
        """Returns m(x_test) + k(x_test, x_train) K^-1 (y - m(x_train)), [row of x_test]."""
        return numpy.asarray(covariance @ self._weights + self.prior_mean.at(x_test))

    def deviation(self, covariance: Array) -> Array:
        """Returns sqrt(k(x, x) - k(x, x_train) K^-1 k(x_train, x)), [configuration of x_test]."""
        explained = self.explained(covariance)
        variance = self.prior_variance - numpy.einsum("ij,ij->j", explained, explained)
        return numpy.asarray(numpy.sqrt(numpy.maximum(variance, 0.0)))

    def explained(self, covariance: Array) -> Array:
        """Returns L^-1 k(x_train, x_test) with K = L L', [configuration of x_train, of x_test]."""
        return numpy.asarray(self._inverse_root @ covariance.T)


class PosteriorOneByOne:
    """The posterior at some configurations, while one after the other of them is believed.

    Its expected value m(c) + d counts as measured, as in `Surrogate.believing`. That is one more
    step of a Cholesky factorization. With c the one believed and k(x, c | data) the covariance of
    the posterior,

        w(x) = k(x, c | data) / sqrt(k(c, c | data) + noise^2)
        k(x, x | data, c) = k(x, x | data) - w(x)^2
        m(x | data, c) = m(x) + w(x) d / sqrt(k(c, c | data) + noise^2)
    """

    def __init__(
        self, x_test: Array, *, mean: Array, explained: Array, fields: tuple[int, ...], fit: _Fit
    ) -> None:
        """`explained` is that of the data so far, [configuration of x_train, of x_test]."""
        self._x_test = x_test
        self._explained = explained
        self._fields = fields
        self._fit = fit
        self._steps: list[Array] = []
        """w of each configuration believed so far, [configuration of x_test]."""
        self._mean = mean
        self._variance = fit.prior_variance - numpy.einsum("ij,ij->j", explained, explained)

    def at(self, indices: Sequence[int]) -> Posterior:
        """Returns the posterior at the rows `indices` of x_test."""
        variance = numpy.maximum(self._variance[indices], 0.0)
        return Posterior(mean=self._mean[indices], deviation=numpy.sqrt(variance))

    def believe(self, index: int, *, above_mean: float = 0.0) -> Array:
        """Let the mean of one row of x_test, or a value `above_mean`, count as measured.

        Return by how much each mean has risen.
        """
        scales = self._fit.scales
        believed = self._x_test[index : index + 1]
        prior = scales.kernel(_Closeness.between(self._x_test, believed, self._fields))[:, 0]
        covariance = prior - self._explained.T @ self._explained[:, index]
        for step in self._steps:
            covariance -= step * step[index]
        deviation = math.sqrt(max(covariance[index], 0.0) + scales.noise**2 + _JITTER)
        step = covariance / deviation
        self._steps.append(step)
        rises = step * (above_mean / deviation)
        self._mean = self._mean + rises
        self._variance = self._variance - step**2
        return rises
