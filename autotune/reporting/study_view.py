"""The data of one study that figures and reports are made from."""

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
    """Predictions by configuration fingerprint; more configurations are predicted than tried."""
    begun_at: str = ""
    """Start of the study in UTC, to the minute."""
    last_result_at: str = ""
    """Time of the last result, in the same form."""

    @property
    def baseline(self) -> TrialRecord | None:
        """The trial of the baseline configuration, if there is one."""
        number = self.result.baseline
        return None if number is None else self.result.trial(number)

    @property
    def pick(self) -> TrialRecord | None:
        """The picked trial, or None if no trial is feasible."""
        if self.result.pick is None:
            return None
        return self.result.trial(self.result.pick.number)

    def prediction_of(self, config: TrainingConfig) -> Prediction | None:
        """Returns the prediction for a configuration, or None if it has none."""
        forecast = self.forecasts.get(config.fingerprint)
        return None if forecast is None else forecast.prediction
