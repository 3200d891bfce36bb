"""What a study knows of a configuration before it is run: its prediction, and whether it is another one's program."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from autotune.failpoints import failpoint
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Forecast
from autotune.spec.result import Measurement, TrialRecord
from autotune.spec.study import StudyDefinition
from autotune.storage.store import StudyStore
from autotune.units import format_size


class PredictionCache:
    """Predictions of one study, kept in its database.

    Without `predict` only what is kept already is known.
    """

    def __init__(
        self,
        definition: StudyDefinition,
        *,
        store: StudyStore,
        predict: Callable[[TrainingConfig], Forecast] | None,
        retry: Callable[[Callable[[], Any]], Any] = lambda call: call(),
    ) -> None:
        self._definition = definition
        self._store = store
        self._predict = predict
        self._retry = retry
        self._known: dict[str, Forecast] = retry(lambda: store.forecasts(definition.name))
        self._without: set[TrainingConfig] = set()

    def do_without(self, config: TrainingConfig) -> None:
        """Leaves a configuration unpredicted whose prediction would change nothing."""
        self._without.add(config)

    def of(self, config: TrainingConfig) -> Forecast | None:
        """The configuration's forecast, predicted now if it never was; None where nothing is to be predicted."""
        known = self._known.get(config.fingerprint)
        if known is None and not self.is_known(config) and self._predict is not None:
            known = self._predict(config)
            self._keep(known)
        return known

    def _keep(self, forecast: Forecast) -> None:
        self._retry(lambda: self._store.keep_forecast(self._definition.name, forecast))
        self._known[forecast.config.fingerprint] = forecast
        failpoint("forecast kept")

    @property
    def known(self) -> Mapping[str, Forecast]:
        """Fingerprint to forecast, of all that was predicted so far."""
        return self._known

    def is_known(self, config: TrainingConfig) -> bool:
        """Or need not be known."""
        return config.fingerprint in self._known or self._predict is None or config in self._without

    def not_to_train(
        self, records: Iterable[TrialRecord], *, limit_bytes: int
    ) -> set[TrainingConfig]:
        """What was predicted to be surely over the limit, or to run the very program a finished trial ran."""
        finished = [
            self._known.get(record.config.fingerprint) for record in records if record.is_finished
        ]
        programs = {
            forecast.plan
            for forecast in finished
            if forecast is not None and forecast.plan is not None
        }
        return {
            forecast.config
            for forecast in self._known.values()
            if forecast.plan in programs or _is_over(forecast, limit_bytes)
        }

    def refused(self, config: TrainingConfig, *, limit_bytes: int) -> Measurement | None:
        """The measurement that takes the place of a training where even the least it can need exceeds the limit."""
        forecast = self.of(config)
        if forecast is None or forecast.prediction is None or not _is_over(forecast, limit_bytes):
            return None
        needed = format_size(forecast.prediction.peak_memory_bytes)
        return Measurement(
            outcome="predicted_over_cap",
            message=f"predicted to need {needed} of {format_size(limit_bytes)}",
            peak_phase=forecast.prediction.phase,
        )

    def same_program(
        self, config: TrainingConfig, records: Iterable[TrialRecord]
    ) -> TrialRecord | None:
        """A finished trial that ran the very program this configuration compiles to, if there is one."""
        forecast = self.of(config)
        if forecast is None or forecast.plan is None:
            return None
        for record in records:
            other = self._known.get(record.config.fingerprint)
            if other is not None and other.plan == forecast.plan and record.is_finished:
                return record
        return None


def _is_over(forecast: Forecast, limit_bytes: int) -> bool:
    """Whether even the least that the prediction leaves room for is more than the limit."""
    return forecast.prediction is not None and forecast.prediction.lower_bound_bytes > limit_bytes
