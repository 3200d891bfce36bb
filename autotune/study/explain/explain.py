"""Explains one configuration: predicts it, its alternatives and pairs, and describes them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from autotune.analysis.explanation import Explanation, explain
from autotune.analysis.variants import Explained, Variant
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Forecast, Prediction
from autotune.spec.result import TrialRecord
from autotune.study.explain.alternatives import (
    Unavailable,
    unavailable_on,
    wanted_pairs,
    wanted_variants,
)
from autotune.study.prediction.predictions import Forecaster

OnPrediction = Callable[[int, int], None]
"""Called with the number of predictions made, and the number planned so far."""


def explain_configuration(
    forecaster: Forecaster,
    config: TrainingConfig,
    *,
    record: TrialRecord | None = None,
    records: Sequence[TrialRecord] = (),
    unavailable: Unavailable | None = None,
    progress: OnPrediction = lambda made, wanted: None,
) -> Explanation:
    """Returns the explanation of `config`.

    `record` and `records` are its trial and all trials of the study, if it is of one. Raises
    PredictionImpossible and IllegalConfiguration.
    """
    known = unavailable_on(forecaster.device_type, unavailable or {})
    predictions = _Predictions(forecaster, progress)
    prediction = predictions.with_timeline(config)
    explained = Explained(
        config=config,
        prediction=prediction,
        at=forecaster.workload.legality_context,
        record=record,
        records=records,
    )
    wanted = wanted_variants(config, prediction, at=explained.at, unavailable=known)
    predictions.make(variant.config for variant in wanted.variants)
    variants = [predictions.fill_in(variant) for variant in wanted.variants]
    pairs = wanted_pairs(explained, variants, unavailable=known)
    predictions.make(config for pair in pairs for config in (pair.alone, pair.together))
    pairs = [
        replace(
            pair,
            alone_peak_bytes=predictions.peak_of(pair.alone),
            together_peak_bytes=predictions.peak_of(pair.together),
        )
        for pair in pairs
    ]
    return explain(explained, variants, pairs, impossible=wanted.impossible)


class _Predictions:
    """Predictions, each made once and several at a time."""

    def __init__(self, forecaster: Forecaster, progress: OnPrediction) -> None:
        self._forecaster = forecaster
        self._progress = progress
        self._made: dict[str, Forecast] = {}

    def with_timeline(self, config: TrainingConfig) -> Prediction:
        """Predict with a timeline, which shows how far into a phase the peak is."""
        self._progress(0, 1)
        prediction = self._forecaster.predict(config, with_timeline=True)
        self._add(Forecast(config=config, prediction=prediction), wanted=1)
        return prediction

    def make(self, configs: Iterable[TrainingConfig]) -> None:
        missing = {c.fingerprint: c for c in configs if c.fingerprint not in self._made}
        wanted = len(self._made) + len(missing)
        # The slowest first: a whole model compiles while many others are predicted.
        ordered = sorted(
            missing.values(), key=lambda config: ("model", "block", "none").index(config.compile)
        )
        self._forecaster.forecast_all(
            ordered, on_each=lambda forecast: self._add(forecast, wanted=wanted)
        )

    def fill_in(self, variant: Variant) -> Variant:
        """Returns the variant with its prediction, or the reason why there is none."""
        forecast = self._made[variant.config.fingerprint]
        return replace(variant, prediction=forecast.prediction, error=forecast.error)

    def peak_of(self, config: TrainingConfig) -> int | None:
        prediction = self._made[config.fingerprint].prediction
        return None if prediction is None else prediction.peak_memory_bytes

    def _add(self, forecast: Forecast, *, wanted: int) -> None:
        self._made[forecast.config.fingerprint] = forecast
        self._progress(len(self._made), wanted)
