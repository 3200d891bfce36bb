"""What a configuration will need: from its prediction where there is one, else from its like.

A prediction is corrected by how far the study's own predictions were off; until there are any, its
bounds say how far that can be.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy
from numpy.typing import NDArray

from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Forecast, Prediction
from autotune.spec.result import TrialRecord
from autotune.study.sampler.ehvi import normal_cdf, normal_density
from autotune.study.sampler.features import Array, features_of
from autotune.study.sampler.surrogate import Surrogate
from autotune.study.sampler.training_subset import TrainingSubset

_NOISE = 0.01
_LEAST_DEVIATION = 0.001
"""Both in logarithms."""
_MORE_THAN_REFUSED = 1.05


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Of each configuration asked about."""

    if_it_fits: Array
    """Expected peak in bytes, should the configuration fit."""
    probability_of_feasibility: Array
    """Probability that it fits."""
    is_predicted: NDArray[numpy.bool_]


class MemoryModel:
    """Peaks of the configurations of a study under its cap, by what was predicted and measured so far."""

    def __init__(
        self,
        records: Sequence[TrialRecord],
        forecasts: Sequence[Forecast],
        *,
        cap_bytes: int,
        training_subset: TrainingSubset | None = None,
    ) -> None:
        self.predictions = {
            f.config.fingerprint: f.prediction for f in forecasts if f.prediction is not None
        }
        """By fingerprint."""
        self.room_bytes = _room_bytes(records, cap_bytes=cap_bytes)
        """The largest peak that fits."""
        self._peaks = _known_peaks(records, forecasts, self.predictions, room_bytes=self.room_bytes)
        self._errors = _PredictionErrors(self._peaks, self.predictions, records)
        self._training_subset = training_subset or TrainingSubset()

    @property
    def seen(self) -> int:
        """How many peaks are known."""
        return len(self._peaks)

    def of(
        self, configs: Sequence[TrainingConfig], *, features: Array | None = None
    ) -> MemoryEstimate:
        """`features`: those of `configs`, where they are known already."""
        mean, deviation = self._from_their_like(
            features_of(configs) if features is None else features
        )
        is_predicted = numpy.zeros(len(configs), dtype=bool)
        for place, config in enumerate(configs):
            if prediction := self.predictions.get(config.fingerprint):
                error = self._errors.of(config, prediction)
                mean[place] = math.log(prediction.peak_memory_bytes) + error.mean
                deviation[place] = error.deviation
                is_predicted[place] = True
        margin = (math.log(self.room_bytes) - mean) / deviation
        probability_of_feasibility = normal_cdf(margin)
        # The mean of a normal distribution that is cut off above the room.
        below = mean - deviation * normal_density(margin) / numpy.maximum(
            probability_of_feasibility, 1e-12
        )
        peak = numpy.exp(numpy.minimum(below, math.log(self.room_bytes)))
        return MemoryEstimate(
            if_it_fits=peak,
            probability_of_feasibility=probability_of_feasibility,
            is_predicted=is_predicted,
        )

    def _from_their_like(self, features: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of the logarithm; where nothing is known at all, anything up to the room."""
        if not self._peaks:
            return numpy.full(len(features), math.log(self.room_bytes / 2)), numpy.ones(
                len(features)
            )
        belief = self._like.of(features)
        return belief.mean, numpy.maximum(belief.deviation, _LEAST_DEVIATION)

    @cached_property
    def _like(self) -> Surrogate:
        configs, sizes = zip(*self._peaks.values(), strict=True)
        places = self._training_subset.places(configs)
        seen = features_of([configs[place] for place in places])
        return Surrogate(seen, [math.log(sizes[place]) for place in places], noises=(_NOISE,))


def _room_bytes(records: Sequence[TrialRecord], *, cap_bytes: int) -> float:
    """The cap less the device's own share, its context; never less than what was seen to fit.

    What the allocator keeps beside the tensors is not taken off: under a cap it gives most of that
    back.
    """
    contexts = [record.context_bytes for record in records if record.context_bytes]
    fitted = max(
        (record.peak_memory_bytes or 0 for record in records if record.feasible), default=0
    )
    return max(1.0, float(fitted), cap_bytes - (statistics.median(contexts) if contexts else 0.0))


_Peak = tuple[TrainingConfig, float]
"""In bytes. No class of its own: there are thousands, made anew for each choice."""


def _known_peaks(
    records: Sequence[TrialRecord],
    forecasts: Iterable[Forecast],
    predictions: Mapping[str, Prediction],
    *,
    room_bytes: float,
) -> dict[str, _Peak]:
    """Peaks by fingerprint: measured, else what was refused and a little more, else predicted."""
    peaks: dict[str, _Peak] = {}
    for record in records:
        size = float(record.peak_memory_bytes or 0)
        if record.outcome == "out_of_memory":
            refused_at = max(
                room_bytes, (record.peak_memory_bytes or 0) + (record.requested_bytes or 0)
            )
            predicted = predictions.get(record.config.fingerprint)
            size = max(
                _MORE_THAN_REFUSED * refused_at, predicted.peak_memory_bytes if predicted else 0
            )
        if size:
            peaks[record.config.fingerprint] = record.config, size
    for forecast in forecasts:
        if forecast.prediction is not None and forecast.config.fingerprint not in peaks:
            size = float(forecast.prediction.peak_memory_bytes)
            peaks[forecast.config.fingerprint] = forecast.config, size
    return peaks


@dataclass(frozen=True, kw_only=True)
class _Error:
    """Logarithm of measured over predicted, normally distributed."""

    mean: float
    deviation: float


class _PredictionErrors:
    """How far predictions were off in this study: the bounds of the first prediction, narrowed by what was measured."""

    def __init__(
        self,
        peaks: Mapping[str, _Peak],
        predictions: Mapping[str, Prediction],
        records: Sequence[TrialRecord],
    ) -> None:
        seen: dict[str, list[float]] = defaultdict(list)
        for config in (record.config for record in records):
            predicted, peak = predictions.get(config.fingerprint), peaks.get(config.fingerprint)
            if predicted is not None and peak is not None:
                seen[config.precision].append(math.log(peak[1] / predicted.peak_memory_bytes))
        self._of_precision = {precision: _summed(errors) for precision, errors in seen.items()}

    def of(self, config: TrainingConfig, prediction: Prediction) -> _Error:
        """Of a precision, as if one prediction had been seen to be off by half of what its bounds leave room for."""
        count, mean, squares = self._of_precision.get(config.precision, (0, 0.0, 0.0))
        room = (
            (prediction.upper_bound_bytes - prediction.lower_bound_bytes)
            / prediction.peak_memory_bytes
            / 4
        )
        variance = (room**2 + mean**2 + squares) / (count + 1)
        return _Error(mean=mean, deviation=max(_LEAST_DEVIATION, math.sqrt(variance)))


def _summed(errors: Sequence[float]) -> tuple[int, float, float]:
    """Their number, their mean together with one of 0, and the sum of their squared distances from it."""
    mean = sum(errors) / (len(errors) + 1)
    return len(errors), mean, sum((error - mean) ** 2 for error in errors)
