"""What a study knows of a configuration before it is run: its prediction, and whether it is another one's program."""

from collections.abc import Callable, Iterable

from autotune.config import TrainingConfig
from autotune.definition import StudyDefinition
from autotune.prediction import Forecast
from autotune.quantities import format_size
from autotune.result import Measurement, TrialRecord
from autotune.storage import StudyStore


class Foresight:
    """Predictions of one study, kept in its database. Without `predict` only what is kept already is known."""

    def __init__(
        self, definition: StudyDefinition, *, store: StudyStore, predict: Callable[[TrainingConfig], Forecast] | None
    ) -> None:
        self._definition = definition
        self._store = store
        self._predict = predict
        self._known = store.forecasts(definition.name)

    def of(self, config: TrainingConfig) -> Forecast | None:
        """The configuration's forecast, predicted now if it never was; None where nothing is to be predicted."""
        known = self._known.get(config.fingerprint)
        if known is None and self._predict is not None:
            known = self._predict(config)
            self._store.keep_forecast(self._definition.name, known)
            self._known[config.fingerprint] = known
        return known

    def is_known(self, config: TrainingConfig) -> bool:
        return config.fingerprint in self._known or self._predict is None

    def refused(self, config: TrainingConfig, *, limit_bytes: int) -> Measurement | None:
        """The measurement that takes the place of a training where even the least it can need exceeds the limit."""
        forecast = self.of(config)
        if forecast is None or forecast.prediction is None or forecast.prediction.lower_bound_bytes <= limit_bytes:
            return None
        needed = format_size(forecast.prediction.peak_memory_bytes)
        return Measurement(
            outcome="predicted_over_cap",
            message=f"predicted to need {needed} of {format_size(limit_bytes)}",
            peak_phase=forecast.prediction.phase,
        )

    def same_program(self, config: TrainingConfig, records: Iterable[TrialRecord]) -> TrialRecord | None:
        """A finished trial that ran the very program this configuration compiles to, if there is one."""
        forecast = self.of(config)
        if forecast is None or forecast.plan is None:
            return None
        for record in records:
            other = self._known.get(record.config.fingerprint)
            if other is not None and other.plan == forecast.plan and record.is_finished:
                return record
        return None
