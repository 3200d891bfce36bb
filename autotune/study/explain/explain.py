"""An explanation of one configuration: it, its alternatives and pairs of them are predicted, then put into words."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from autotune.analysis.explanation import Explanation, explain
from autotune.analysis.variants import Explained, Variant
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Forecast, Prediction
from autotune.spec.result import TrialRecord
from autotune.study.explain.alternatives import Unavailable, wanted_pairs, wanted_variants
from autotune.study.predictions import Forecaster

Progress = Callable[[int, int], None]
"""Called with how many predictions are made, and how many there are by all that is known so far."""


def explain_configuration(
    forecaster: Forecaster,
    config: TrainingConfig,
    *,
    record: TrialRecord | None = None,
    records: Sequence[TrialRecord] = (),
    unavailable: Unavailable | None = None,
    progress: Progress = lambda made, wanted: None,
) -> Explanation:
    """`record` and `records`: the trial and all trials of its study.

    Raises PredictionImpossible and IllegalConfiguration.
    """
    predictions = _Predictions(forecaster, progress)
    prediction = predictions.of_the_explained(config)
    explained = Explained(
        config=config,
        prediction=prediction,
        at=forecaster.workload.circumstances,
        record=record,
        records=records,
    )
    wanted = wanted_variants(
        config,
        prediction,
        at=explained.at,
        unavailable=unavailable or {},
    )
    predictions.make(variant.config for variant in wanted.variants)
    variants = [predictions.filled_in(variant) for variant in wanted.variants]
    pairs = wanted_pairs(explained, variants, unavailable=unavailable or {})
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
    """Made once each, several at a time."""

    def __init__(self, forecaster: Forecaster, progress: Progress) -> None:
        self._forecaster = forecaster
        self._progress = progress
        self._made: dict[str, Forecast] = {}

    def of_the_explained(self, config: TrainingConfig) -> Prediction:
        """With its timeline, which tells how far into a phase the peak is."""
        self._progress(0, 1)
        prediction = self._forecaster.predict(config, with_timeline=True)
        self._keep(Forecast(config=config, prediction=prediction), wanted=1)
        return prediction

    def make(self, configs: Iterable[TrainingConfig]) -> None:
        missing = {c.fingerprint: c for c in configs if c.fingerprint not in self._made}
        wanted = len(self._made) + len(missing)
        # The longest first: a whole model compiles while many others are predicted.
        ordered = sorted(
            missing.values(), key=lambda config: ("model", "block", "none").index(config.compile)
        )
        self._forecaster.forecast_all(
            ordered, on_each=lambda forecast: self._keep(forecast, wanted=wanted)
        )

    def filled_in(self, variant: Variant) -> Variant:
        forecast = self._made[variant.config.fingerprint]
        return replace(variant, prediction=forecast.prediction, refusal=forecast.refusal)

    def peak_of(self, config: TrainingConfig) -> int | None:
        prediction = self._made[config.fingerprint].prediction
        return None if prediction is None else prediction.peak_memory_bytes

    def _keep(self, forecast: Forecast, *, wanted: int) -> None:
        self._made[forecast.config.fingerprint] = forecast
        self._progress(len(self._made), wanted)
