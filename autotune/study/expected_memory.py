"""What a configuration will need: from its prediction where there is one, else from its like.

A prediction is corrected by how far the study's own predictions were off; until there are any, its bounds say how far
that can be.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from autotune.config import TrainingConfig
from autotune.prediction import Forecast, Prediction
from autotune.result import TrialRecord
from autotune.study.gain import Array, normal_cdf, normal_density
from autotune.study.surrogate import believe

_NOISE = 0.01
_LEAST_DEVIATION = 0.001
"""Both in logarithms."""
_MORE_THAN_REFUSED = 1.05


@dataclass(frozen=True, kw_only=True)
class Need:
    """Of each configuration asked about."""

    if_it_fits: Array
    """Expected peak in bytes, should the configuration fit."""
    chance: Array
    """Probability that it fits."""
    is_predicted: NDArray[numpy.bool_]


class ExpectedMemory:
    """Peaks of the configurations of a study under its cap, by what was predicted and measured so far."""

    def __init__(self, records: Sequence[TrialRecord], forecasts: Iterable[Forecast], *, cap_bytes: int) -> None:
        self.predictions = {f.config: f.prediction for f in forecasts if f.prediction is not None}
        self.room_bytes = _room_bytes(records, cap_bytes=cap_bytes)
        """The largest peak that fits."""
        self._peaks = _known_peaks(records, self.predictions, room_bytes=self.room_bytes)
        self._errors = _PredictionErrors(self._peaks, self.predictions, records)

    @property
    def seen(self) -> int:
        """How many peaks are known."""
        return len(self._peaks)

    def of(self, configs: Sequence[TrainingConfig]) -> Need:
        mean, deviation = self._from_their_like(configs)
        is_predicted = numpy.zeros(len(configs), dtype=bool)
        for place, config in enumerate(configs):
            if prediction := self.predictions.get(config):
                error = self._errors.of(config, prediction)
                mean[place] = math.log(prediction.peak_memory_bytes) + error.mean
                deviation[place] = error.deviation
                is_predicted[place] = True
        margin = (math.log(self.room_bytes) - mean) / deviation
        chance = normal_cdf(margin)
        # The mean of a normal distribution that is cut off above the room.
        below = mean - deviation * normal_density(margin) / numpy.maximum(chance, 1e-12)
        peak = numpy.exp(numpy.minimum(below, math.log(self.room_bytes)))
        return Need(if_it_fits=peak, chance=chance, is_predicted=is_predicted)

    def _from_their_like(self, configs: Sequence[TrainingConfig]) -> tuple[Array, Array]:
        """Mean and standard deviation of the logarithm; where nothing is known at all, anything up to the room."""
        if not self._peaks:
            return numpy.full(len(configs), math.log(self.room_bytes / 2)), numpy.ones(len(configs))
        seen, sizes = zip(*self._peaks.items(), strict=True)
        belief = believe(configs, seen=seen, logarithms=[math.log(size) for size in sizes], noises=(_NOISE,))
        return belief.mean, numpy.maximum(belief.deviation, _LEAST_DEVIATION)


def _room_bytes(records: Sequence[TrialRecord], *, cap_bytes: int) -> float:
    """The cap less the device's own share, its context; never less than what was seen to fit.

    What the allocator keeps beside the tensors is not taken off: under a cap it gives most of that back.
    """
    contexts = [record.context_bytes for record in records if record.context_bytes]
    fitted = max((record.peak_memory_bytes or 0 for record in records if record.feasible), default=0)
    return max(1.0, float(fitted), cap_bytes - (statistics.median(contexts) if contexts else 0.0))


def _known_peaks(
    records: Sequence[TrialRecord], predictions: Mapping[TrainingConfig, Prediction], *, room_bytes: float
) -> dict[TrainingConfig, float]:
    """Peaks: measured, else what was refused and a little more, else predicted."""
    peaks: dict[TrainingConfig, float] = {}
    for record in records:
        predicted = predictions.get(record.config)
        if record.outcome == "out_of_memory":
            refused_at = max(room_bytes, (record.peak_memory_bytes or 0) + (record.requested_bytes or 0))
            least = _MORE_THAN_REFUSED * refused_at
            peaks[record.config] = max(least, predicted.peak_memory_bytes) if predicted else least
        elif record.peak_memory_bytes:
            peaks[record.config] = float(record.peak_memory_bytes)
    predicted_peaks = {config: float(prediction.peak_memory_bytes) for config, prediction in predictions.items()}
    return {**peaks, **{config: size for config, size in predicted_peaks.items() if config not in peaks}}


@dataclass(frozen=True, kw_only=True)
class _Error:
    """Logarithm of measured over predicted, normally distributed."""

    mean: float
    deviation: float


class _PredictionErrors:
    """How far predictions were off in this study: the bounds of the first prediction, narrowed by what was measured."""

    def __init__(
        self,
        peaks: Mapping[TrainingConfig, float],
        predictions: Mapping[TrainingConfig, Prediction],
        records: Sequence[TrialRecord],
    ) -> None:
        self._seen: dict[str, list[float]] = defaultdict(list)
        for config in (record.config for record in records):
            if config in predictions and config in peaks:
                self._seen[config.precision].append(math.log(peaks[config] / predictions[config].peak_memory_bytes))

    def of(self, config: TrainingConfig, prediction: Prediction) -> _Error:
        """Of a precision, as if one prediction had been seen to be off by half of what its bounds leave room for."""
        seen = self._seen[config.precision]
        room = (prediction.upper_bound_bytes - prediction.lower_bound_bytes) / prediction.peak_memory_bytes / 4
        mean = sum(seen) / (len(seen) + 1)
        squares = room**2 + mean**2 + sum((error - mean) ** 2 for error in seen)
        return _Error(mean=mean, deviation=max(_LEAST_DEVIATION, math.sqrt(squares / (len(seen) + 1))))
