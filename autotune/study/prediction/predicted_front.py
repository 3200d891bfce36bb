"""The front of memory and speed that a space is expected to have, before anything is trained.

The named configurations are predicted, and by them all others are estimated: their memory by the
model that a search has of it, their speed from the baseline's prediction (`expected_step.py`).
Those on the estimated front are predicted whole, the fastest first, and the estimates made again,
until the whole front is predicted or the time is over.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy

from autotune.analysis.expected_step import ExpectedStep
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Forecast, context_bytes_on
from autotune.spec.search_space import LegalSpace
from autotune.study.prediction.predictions import Forecaster
from autotune.study.sampler.ehvi import indices_not_dominated
from autotune.study.sampler.features import EXPECTATION, Candidates
from autotune.study.sampler.memory_model import MemoryModel

MOST_SECONDS = 45.0
"""After which no further prediction begins."""
LIKELY = 0.5
"""The least probability of fitting of what is on the estimated front."""


@dataclass(frozen=True, kw_only=True)
class PredictedFront:
    """What is expected of a search space under a cap."""

    forecasts: tuple[Forecast, ...]
    """All that were made."""
    front: tuple[str, ...]
    """Fingerprints of the predicted configurations that no other one beats in memory and speed,
    those of least memory first; perplexity is not predicted."""
    legal: int
    """Number of legal configurations, with the named ones and the baseline."""
    is_listed: bool
    """Whether all of them were estimated, or those that are drawn of a large space."""
    may_fit: int
    """How many of those that are estimated and not predicted fit by the memory model."""
    is_complete: bool
    """Whether every configuration on the estimated front was predicted."""


def predicted_front(
    forecaster: Forecaster,
    legal: LegalSpace,
    *,
    baseline: TrainingConfig,
    cap_bytes: int | None,
    on_each: Callable[[Forecast], None] = lambda _: None,
) -> PredictedFront | None:
    """Returns the front, or None where no speed can be expected of the baseline.

    Without a cap, that is all memory of the device.
    """
    device = forecaster.described
    if device is None:
        return None
    ends = time.monotonic() + MOST_SECONDS
    first = {c.fingerprint: c for c in (baseline, *legal.named.values())}
    forecasts = forecaster.forecast_all(first.values(), on_each=on_each)
    of_baseline = next(one.prediction for one in forecasts if one.config == baseline)
    if of_baseline is None:
        return None
    expected = ExpectedStep.from_prediction(
        of_baseline, baseline, workload=forecaster.workload, device=device
    )
    if expected is None:
        return None
    estimated = _Estimated(
        legal,
        forecasts,
        expected=expected,
        room_bytes=(cap_bytes or device.total_memory_bytes) - context_bytes_on(device.type),
    )
    longest = 0.0
    while (wanted := estimated.wanted()) and time.monotonic() + longest < ends:
        began = time.monotonic()
        batch = wanted[: forecaster.executor.predictions_at_once]
        estimated.add(forecaster.forecast_all(batch, on_each=on_each))
        longest = max(longest, time.monotonic() - began)
    return PredictedFront(
        forecasts=tuple(estimated.forecasts),
        front=estimated.front(),
        legal=legal.count() + sum(one.config not in legal for one in forecasts),
        is_listed=legal.is_listed,
        may_fit=estimated.may_fit(),
        is_complete=not wanted,
    )


class _Estimated:
    """Memory and speed of all legal configurations, by what is predicted so far."""

    def __init__(
        self,
        legal: LegalSpace,
        forecasts: Sequence[Forecast],
        *,
        expected: ExpectedStep,
        room_bytes: int,
    ) -> None:
        self.forecasts = list(forecasts)
        self._expected = expected
        self._room_bytes = room_bytes
        configs = {one.fingerprint: one for one in legal.sample()}
        configs |= {one.config.fingerprint: one.config for one in forecasts}
        self.configs = list(configs.values())
        self._index = {fingerprint: index for index, fingerprint in enumerate(configs)}
        self._candidates = Candidates.of(self.configs, expected=expected)
        self._speeds = numpy.exp(self._candidates.for_speed[:, EXPECTATION])
        self._is_known = numpy.zeros(len(self.configs), dtype=bool)
        self._note(forecasts)
        self._estimate()

    def add(self, forecasts: Sequence[Forecast]) -> None:
        """Take further forecasts into account."""
        self.forecasts += forecasts
        self._note(forecasts)
        self._estimate()

    def wanted(self) -> list[TrainingConfig]:
        """Returns those of the estimated front that are not predicted, the fastest first."""
        likely = numpy.flatnonzero(self._probability >= LIKELY)
        level = numpy.zeros(len(likely))
        front = indices_not_dominated(self._peaks[likely], self._speeds[likely], level)
        missing = [index for index in likely[front] if not self._is_known[index]]
        return [self.configs[index] for index in sorted(missing, key=lambda i: -self._speeds[i])]

    def front(self) -> tuple[str, ...]:
        """Returns the fingerprints of the predicted ones that are not dominated and may fit."""
        fitting = [
            (one.config.fingerprint, one.prediction)
            for one in self.forecasts
            if one.prediction is not None
            and one.prediction.predicted_tokens_per_second
            and one.prediction.peak_memory_bytes <= self._room_bytes
        ]
        memory = numpy.array([float(found.peak_memory_bytes) for _, found in fitting])
        speed = numpy.array([found.predicted_tokens_per_second or 0.0 for _, found in fitting])
        front = indices_not_dominated(memory, speed, numpy.zeros(len(fitting)))
        return tuple(fitting[index][0] for index in front)

    def may_fit(self) -> int:
        """Returns how many that are not predicted probably fit."""
        return int(((self._probability >= LIKELY) & ~self._is_known).sum())

    def _note(self, forecasts: Sequence[Forecast]) -> None:
        """Let predicted speeds stand in for expected ones; what has none is not wanted again."""
        for one in forecasts:
            index = self._index[one.config.fingerprint]
            self._is_known[index] = True
            found = one.prediction
            self._speeds[index] = (found and found.predicted_tokens_per_second) or 0.0

    def _estimate(self) -> None:
        memory = MemoryModel(
            [], self.forecasts, cap_bytes=self._room_bytes, expected=self._expected
        )
        estimate = memory.estimate(self._candidates)
        self._peaks = estimate.if_it_fits
        self._probability = estimate.probability_of_feasibility
