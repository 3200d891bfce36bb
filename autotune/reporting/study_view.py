"""All that is known of a study, as figures and reports look at it."""

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Forecast, Prediction
from autotune.spec.result import StudyResult, TrialRecord
from autotune.spec.study import StudyDefinition


@dataclass(frozen=True, kw_only=True)
class StudyView:
    """A study's definition, its result, and every prediction made in it."""

    definition: StudyDefinition
    result: StudyResult
    forecasts: Mapping[str, Forecast]
    """By fingerprint; more configurations are predicted than tried."""
    begun_at: str = ""
    """UTC, to the minute."""
    last_result_at: str = ""

    @property
    def baseline(self) -> TrialRecord | None:
        number = self.result.baseline
        return None if number is None else self.result.trial(number)

    @property
    def pick(self) -> TrialRecord | None:
        return None if self.result.pick is None else self.result.trial(self.result.pick.number)

    def prediction_of(self, config: TrainingConfig) -> Prediction | None:
        forecast = self.forecasts.get(config.fingerprint)
        return None if forecast is None else forecast.prediction
