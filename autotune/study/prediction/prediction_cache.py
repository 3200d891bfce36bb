"""Predictions of a study's configurations, and which of them compile to the same program."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from autotune.errors import IllegalConfiguration
from autotune.execution.flow import Flow
from autotune.spec.cap import is_over_cap, need_and_cap
from autotune.spec.config import TrainingConfig, check_legal
from autotune.spec.prediction import Forecast
from autotune.spec.result import Measurement, TrialRecord
from autotune.spec.setting import NO_LIMIT
from autotune.spec.study import StudyDefinition
from autotune.storage.store import StudyStore
from autotune.system.failpoints import failpoint

Predictor = Callable[[TrainingConfig], Flow[Forecast]]
"""Predicts a configuration."""


class PredictionCache:
    """Predictions of one study, stored in its database.

    With `predict` None, only the predictions stored already are available.
    """

    def __init__(
        self,
        definition: StudyDefinition,
        *,
        store: StudyStore,
        predict: Predictor | None,
    ) -> None:
        self._definition = definition
        self._store = store
        self._predict = predict
        self._known: dict[str, Forecast] = store.forecasts(definition.name)
        self._not_needed: set[TrainingConfig] = set()
        self._flops: dict[TrainingConfig, float | None] = {}
        """FLOPs per token of plain configurations."""

    @property
    def predicts(self) -> bool:
        """Whether a configuration that has no forecast yet can get one."""
        return self._predict is not None

    def mark_not_needed(self, config: TrainingConfig) -> None:
        """Leave a configuration unpredicted, because its prediction would change nothing."""
        self._not_needed.add(config)

    def predict(self, config: TrainingConfig) -> Flow[Forecast]:
        """Predict a configuration that is not known, without storing its forecast."""
        assert self._predict is not None, "without predictions every configuration is known"
        return self._predict(config)

    def add(self, forecast: Forecast) -> None:
        """Store a forecast."""
        self._store.store_forecast(self._definition.name, forecast)
        self._known[forecast.config.fingerprint] = forecast
        failpoint("forecast kept")

    @property
    def known(self) -> Mapping[str, Forecast]:
        """All forecasts so far, by the configuration's fingerprint."""
        return self._known

    def is_known(self, config: TrainingConfig) -> bool:
        """Returns whether the configuration has a forecast or needs none."""
        if self._predict is None or config in self._not_needed:
            return True
        return config.fingerprint in self._known

    def not_to_train(
        self, tried: Iterable[TrainingConfig], *, limit_bytes: int
    ) -> list[TrainingConfig]:
        """Returns the configurations that are surely over the limit or repeat a program of `tried`.

        `tried` are those that have a result or are running.
        """
        programs = {self._program_of(config) for config in tried} - {None}
        return [
            forecast.config
            for forecast in self._known.values()
            if forecast.plan in programs or _is_over(forecast, limit_bytes)
        ]

    def _program_of(self, config: TrainingConfig) -> tuple[str, str] | None:
        return self._known.get(config.fingerprint, Forecast(config=config)).plan

    def measurement_if_over(
        self, config: TrainingConfig, *, limit_bytes: int
    ) -> Measurement | None:
        """Returns the result of a configuration that is surely over the limit; None otherwise."""
        forecast = self._known.get(config.fingerprint)
        if forecast is None or forecast.prediction is None or not _is_over(forecast, limit_bytes):
            return None
        need = need_and_cap(forecast.prediction.peak_memory_bytes, limit_bytes)
        return Measurement(
            outcome="predicted_over_cap",
            message=f"predicted to need {need}",
            peak_phase=forecast.prediction.phase,
            devices=forecast.prediction.devices,
        )

    def flops_of(self, config: TrainingConfig) -> Flow[tuple[float | None, float | None]]:
        """Returns the FLOPs of a token that the model needs, and those that are recomputed.

        They do not depend on most of a configuration, so a prediction of another one will do. Where
        there is none, the plainest one is predicted. Recomputed FLOPs at a budget, and with tensor
        parallelism, which computes some layers on each device, are only known from their own
        prediction.
        """
        devices = self._definition.workload.devices_per_trial
        model_flops = yield from self._flops_per_token(
            _without_recomputation(config, devices=devices)
        )
        forecast = self._known.get(config.fingerprint)
        if forecast is not None and forecast.prediction is not None:
            flops = forecast.prediction.flops_per_token
        elif not _has_own_flops(config):
            flops = yield from self._flops_per_token(_plain(config, devices=devices))
        else:
            flops = None
        recomputed = None
        if flops is not None and model_flops is not None:
            recomputed = max(0.0, flops - model_flops)
        return model_flops, recomputed

    def _flops_per_token(self, plain: TrainingConfig) -> Flow[float | None]:
        """Returns the FLOPs of a plain configuration, as of any prediction that has the same."""
        if plain not in self._flops:
            devices = self._definition.workload.devices_per_trial
            alike = (
                known
                for known in self._known.values()
                if not _has_own_flops(known.config)
                and _plain(known.config, devices=devices) == plain
            )
            forecast = next(alike, None)
            if forecast is None and self._predict is not None and self._is_legal(plain):
                forecast = yield from self._predict(plain)
            prediction = None if forecast is None else forecast.prediction
            self._flops[plain] = None if prediction is None else prediction.flops_per_token
        return self._flops[plain]

    def _is_legal(self, config: TrainingConfig) -> bool:
        try:
            check_legal(config, self._definition.workload.legality_context)
        except IllegalConfiguration:
            return False
        return True

    def same_program(
        self, config: TrainingConfig, records: Iterable[TrialRecord]
    ) -> TrialRecord | None:
        """Returns a finished trial of the same program, if there is one."""
        program = self._program_of(config)
        for record in records if program is not None else ():
            if record.is_finished and self._program_of(record.config) == program:
                return record
        return None


def _is_over(forecast: Forecast, limit_bytes: int) -> bool:
    """Returns whether even the lower bound of the predicted peak is over the limit."""
    return forecast.prediction is not None and is_over_cap(
        forecast.prediction.lower_bound_bytes, limit_bytes
    )


def _has_own_flops(config: TrainingConfig) -> bool:
    """Returns whether only the prediction of a configuration itself tells its FLOPs."""
    has_budget = config.memory_budget != 1.0 or config.activation_budget != NO_LIMIT
    return has_budget or config.tensor_parallel != 1


def _plain(config: TrainingConfig, *, devices: int) -> TrainingConfig:
    """Returns the plainest configuration whose step has as many FLOPs per token, in fp32."""
    return replace(
        _without_recomputation(config, devices=devices),
        checkpointing=config.checkpointing,
        loss=config.loss,
    )


def _without_recomputation(config: TrainingConfig, *, devices: int) -> TrainingConfig:
    """Returns the plainest training of the model under the same adapter."""
    return TrainingConfig(
        micro_batch_size=1,
        adapter=config.adapter,
        adapter_rank=config.adapter_rank,
        adapter_targets=config.adapter_targets,
        sharding="none" if devices == 1 else "ddp",
    )
