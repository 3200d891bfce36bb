"""Estimates the peak memory of configurations, and the probability that they fit the cap.

The estimate is the configuration's prediction where there is one, corrected by the errors of this
study's predictions so far; until there are any, the prediction's bounds give the size of the error.
Without a prediction it is the surrogate's posterior over similar configurations. Logarithms of
peaks are normally distributed in both.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy
from numpy.typing import NDArray

from autotune.analysis.expected_step import ExpectedStep
from autotune.analysis.feasibility import needed_bytes
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Forecast, Prediction
from autotune.spec.result import TrialRecord
from autotune.study.sampler.ehvi import normal_cdf, normal_density
from autotune.study.sampler.features import Array, Candidates
from autotune.study.sampler.surrogate import Surrogate
from autotune.study.sampler.training_subset import TrainingSubset

_NOISE = 0.01
_LEAST_DEVIATION = 0.001
"""Standard deviations of a measured peak and of any estimate (at least), in logarithms."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Estimates for each configuration, each [configuration]."""

    if_it_fits: Array
    """Expected peak in bytes, provided that the configuration fits."""
    probability_of_feasibility: Array
    """Probability that it fits."""
    is_predicted: NDArray[numpy.bool_]
    """Whether the estimate comes from a prediction of this configuration."""


class MemoryModel:
    """Peaks of a study's configurations, from what has been predicted and measured so far."""

    def __init__(
        self,
        records: Sequence[TrialRecord],
        forecasts: Sequence[Forecast],
        *,
        cap_bytes: int,
        training_subset: TrainingSubset | None = None,
        expected: ExpectedStep | None = None,
    ) -> None:
        self.predictions = {
            f.config.fingerprint: f.prediction for f in forecasts if f.prediction is not None
        }
        """By fingerprint."""
        self.room_bytes = _room_bytes(records, cap_bytes=cap_bytes)
        """The largest peak that fits, in bytes."""
        self._peaks = _known_peaks(records, forecasts, room_bytes=self.room_bytes)
        self._errors = _PredictionErrors(
            self._peaks, self.predictions, records, room_bytes=self.room_bytes
        )
        self._training_subset = training_subset or TrainingSubset()
        self.expected = expected

    @property
    def seen(self) -> int:
        """How many peaks are known."""
        return len(self._peaks)

    def estimate(self, candidates: Candidates) -> MemoryEstimate:
        """Estimate the peaks of configurations.

        With z = (log(room) - mean) / deviation, the probability of feasibility is Phi(z), and the
        expected logarithm of a peak that fits is that of the normal distribution truncated at the
        room: mean - deviation * phi(z) / Phi(z).
        """
        configs = candidates.configs
        mean, deviation = self._by_similar_configurations(candidates.for_memory)
        is_predicted = numpy.zeros(len(configs), dtype=bool)
        for index, config in enumerate(configs):
            if prediction := self.predictions.get(config.fingerprint):
                error = self._errors.of(config, prediction)
                mean[index] = math.log(prediction.peak_memory_bytes) + error.mean
                deviation[index] = error.deviation
                is_predicted[index] = True
        margin = (math.log(self.room_bytes) - mean) / deviation
        probability_of_feasibility = normal_cdf(margin)
        below = mean - deviation * normal_density(margin) / numpy.maximum(
            probability_of_feasibility, 1e-12
        )
        peak = numpy.exp(numpy.minimum(below, math.log(self.room_bytes)))
        return MemoryEstimate(
            if_it_fits=peak,
            probability_of_feasibility=probability_of_feasibility,
            is_predicted=is_predicted,
        )

    def _by_similar_configurations(self, features: Array) -> tuple[Array, Array]:
        """Returns mean and standard deviation of the logarithm of each peak.

        Without any known peak: half of the room, within a factor of e.
        """
        if not self._peaks:
            mean = numpy.full(len(features), math.log(self.room_bytes / 2))
            return mean, numpy.ones(len(features))
        posterior = self._surrogate.predict(features)
        return posterior.mean, numpy.maximum(posterior.deviation, _LEAST_DEVIATION)

    @cached_property
    def _surrogate(self) -> Surrogate:
        configs, sizes = zip(*self._peaks.values(), strict=True)
        indices = self._training_subset.indices(configs)
        known = Candidates.of([configs[index] for index in indices], expected=self.expected)
        y_train = [math.log(sizes[index]) for index in indices]
        return Surrogate(known.for_memory, y_train, noises=(_NOISE,), has_own_scales=True)


def _room_bytes(records: Sequence[TrialRecord], *, cap_bytes: int) -> float:
    """Returns the cap less the device's context, and at least the largest peak that has fitted.

    What the allocator reserves beyond the tensors is not subtracted: under a cap it returns most of
    that.
    """
    contexts = [record.context_bytes for record in records if record.context_bytes]
    context_bytes = statistics.median(contexts) if contexts else 0.0
    fitted = max(
        (record.peak_memory_bytes or 0 for record in records if record.feasible), default=0
    )
    return max(1.0, float(fitted), cap_bytes - context_bytes)


_Peak = tuple[TrainingConfig, float]
"""A configuration and its peak in bytes. A tuple, because thousands are made for each choice."""


def _known_peaks(
    records: Sequence[TrialRecord], forecasts: Iterable[Forecast], *, room_bytes: float
) -> dict[str, _Peak]:
    """Returns peaks by fingerprint: measured, else assumed after running out, else predicted."""
    peaks: dict[str, _Peak] = {}
    for record in records:
        size = float(record.peak_memory_bytes or 0)
        if record.outcome == "out_of_memory":
            size = needed_bytes(record, limit_bytes=room_bytes)
        if size:
            peaks[record.config.fingerprint] = record.config, size
    for forecast in forecasts:
        if forecast.prediction is not None and forecast.config.fingerprint not in peaks:
            size = float(forecast.prediction.peak_memory_bytes)
            peaks[forecast.config.fingerprint] = forecast.config, size
    return peaks


@dataclass(frozen=True, kw_only=True)
class _Error:
    """The logarithm of measured over predicted peak, which is normally distributed."""

    mean: float
    deviation: float


class _PredictionErrors:
    """Errors of this study's predictions, separately for each precision.

    They are estimated from the n errors measured so far and one pseudo-observation: an error of
    size a quarter of the prediction's bounds, relative to its peak. With mean = sum(errors) /
    (n + 1),

        variance = (pseudo^2 + mean^2 + sum((error - mean)^2)) / (n + 1)
    """

    def __init__(
        self,
        peaks: Mapping[str, _Peak],
        predictions: Mapping[str, Prediction],
        records: Sequence[TrialRecord],
        *,
        room_bytes: float,
    ) -> None:
        measured: dict[str, list[float]] = defaultdict(list)
        for record in records:
            config = record.config
            prediction = predictions.get(config.fingerprint)
            peak = peaks.get(config.fingerprint)
            if prediction is None or peak is None:
                continue
            ran_out_as_predicted = (
                record.outcome == "out_of_memory" and prediction.peak_memory_bytes > room_bytes
            )
            if not ran_out_as_predicted:  # otherwise its assumed peak says nothing new
                error = math.log(peak[1] / prediction.peak_memory_bytes)
                measured[config.precision].append(error)
        self._by_precision = {precision: _moments(errors) for precision, errors in measured.items()}

    def of(self, config: TrainingConfig, prediction: Prediction) -> _Error:
        """Returns the distribution of the error of `prediction`."""
        count, mean, squares = self._by_precision.get(config.precision, (0, 0.0, 0.0))
        pseudo_error = (
            (prediction.upper_bound_bytes - prediction.lower_bound_bytes)
            / prediction.peak_memory_bytes
            / 4
        )
        variance = (pseudo_error**2 + mean**2 + squares) / (count + 1)
        return _Error(mean=mean, deviation=max(_LEAST_DEVIATION, math.sqrt(variance)))


def _moments(errors: Sequence[float]) -> tuple[int, float, float]:
    """Returns their number n, sum(errors) / (n + 1), and the sum of squared distances from it."""
    mean = sum(errors) / (len(errors) + 1)
    return len(errors), mean, sum((error - mean) ** 2 for error in errors)
