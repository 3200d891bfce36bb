"""Predictions of a workload's peak memory, of one configuration or many, in warm processes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.analysis.expected_step import with_speed
from autotune.data.sources import check_name
from autotune.errors import InvalidInput, PredictionImpossible, PreparationFailed
from autotune.execution.flow import Flow, result_of, run
from autotune.execution.kept_predictions import read_prediction, write_prediction
from autotune.execution.local import LocalExecutor
from autotune.execution.tasks import Predict
from autotune.spec.config import TrainingConfig, check_legal, configuration_of
from autotune.spec.prediction import (
    Extrapolation,
    Forecast,
    Prediction,
    PredictionRequest,
    check_release,
    parse_compute_capability,
)
from autotune.spec.result import DeviceInfo, StudyResult
from autotune.spec.search_space import SearchSpace
from autotune.spec.workload import Workload, check_adapters, make_workload
from autotune.study.opening.trusted_code import check_trusted
from autotune.study.prediction.predicted_device import PredictedDevice


@dataclass(kw_only=True)
class Forecaster:
    """Predicts configurations of one workload on one kind of device, and remembers predictions."""

    executor: LocalExecutor
    workload: Workload
    device_type: str
    """cpu or cuda; this machine need not have a CUDA device."""
    compute_capability: str | None = None
    """Compute capability of the GPU to predict for, such as 9.0; None: one is assumed, and a note
    of the prediction names it."""
    torch_version: str | None = None
    """The torch release whose CUDA kernels to predict for; None: the installed one."""
    extrapolates: Extrapolation = "compiled"
    """Which deep models may be extrapolated from shallower ones, which takes less time."""
    described: DeviceInfo | None = None
    """The device with its rates, by which speed is predicted; None: only memory is."""
    rates_from: str = ""
    """Where the rates were found."""
    keeps: bool = False
    """Whether predictions are kept for the next command (`execution/kept_predictions.py`)."""
    _known: dict[str, Forecast] = field(default_factory=dict)

    @classmethod
    def for_device(
        cls,
        device: PredictedDevice,
        *,
        executor: LocalExecutor,
        workload: Workload,
        torch_version: str | None = None,
        extrapolates: Extrapolation = "compiled",
    ) -> "Forecaster":
        """Returns a forecaster for a device that is there or described, which keeps predictions."""
        return cls(
            executor=executor,
            workload=workload,
            device_type=device.type,
            compute_capability=device.compute_capability,
            torch_version=torch_version,
            extrapolates=extrapolates,
            described=device.described,
            rates_from=device.rates_from,
            keeps=True,
        )

    @classmethod
    def of_device(
        cls,
        device: DeviceInfo,
        *,
        executor: LocalExecutor,
        workload: Workload,
        torch_version: str | None = None,
        extrapolates: Extrapolation = "compiled",
    ) -> "Forecaster":
        """Returns a forecaster for the GPU or CPU of a study; this machine need not have it."""
        return cls(
            executor=executor,
            workload=workload,
            device_type=device.type,
            compute_capability=device.compute_capability,
            torch_version=torch_version,
            extrapolates=extrapolates,
            described=device,
            rates_from="probed when the study began",
        )

    def __post_init__(self) -> None:
        check_release(self.torch_version)
        if self.compute_capability is not None:
            parse_compute_capability(self.compute_capability)

    def predict(self, config: TrainingConfig, *, with_timeline: bool = False) -> Prediction:
        """Predict one configuration. Raises PredictionImpossible and IllegalConfiguration."""
        predicting = self.predicting(config, with_timeline=with_timeline)
        return result_of(predicting, each=self.executor.check_stop)

    def predicting(
        self, config: TrainingConfig, *, with_timeline: bool = False
    ) -> Flow[Prediction]:
        """As `predict`, in a flow."""
        check_legal(config, self.workload.legality_context)
        request = PredictionRequest(
            workload=self.workload,
            config=config,
            device=self.device_type,
            compute_capability=self.compute_capability,
            torch_version=self.torch_version,
            with_timeline=with_timeline,
            extrapolates=self.extrapolates,
        )
        prediction = read_prediction(request) if self.keeps else None
        if prediction is None:
            prediction = yield from self.executor.perform(Predict(request=request))
            if self.keeps:
                write_prediction(request, prediction)
        if self.described is None:
            return prediction
        return with_speed(prediction, config, workload=self.workload, device=self.described)

    def forecast(self, config: TrainingConfig) -> Forecast:
        """As `predict`, but returns the reason instead of raising, and remembers the forecast."""
        return result_of(self.forecasting(config), each=self.executor.check_stop)

    def forecasting(self, config: TrainingConfig) -> Flow[Forecast]:
        """As `forecast`, in a flow."""
        if config.fingerprint not in self._known:
            try:
                prediction = yield from self.predicting(config)
                forecast = Forecast(config=config, prediction=prediction)
            except (PredictionImpossible, PreparationFailed) as error:
                forecast = Forecast(config=config, error=error.message)
            self._known[config.fingerprint] = forecast
        return self._known[config.fingerprint]

    def forecast_all(
        self,
        configs: Iterable[TrainingConfig],
        *,
        on_each: Callable[[Forecast], None] = lambda _: None,
    ) -> list[Forecast]:
        """Returns the forecasts in the order they ended; as many run at once as there are CPUs."""
        waiting = iter(configs)
        ended: list[Forecast] = []

        def work() -> Flow[None]:
            for config in waiting:
                forecast = yield from self.forecasting(config)
                ended.append(forecast)
                on_each(forecast)

        workers = [work() for _ in range(self.executor.predictions_at_once)]
        run(workers, each=self.executor.check_stop)
        return ended


def extrapolates_in(space: SearchSpace) -> Extrapolation:
    """Returns what the predictions of a search may extrapolate: nothing that changes its trials.

    An extrapolated model has no plan. By their plans a search finds the memory budgets that compile
    to the program of another one, and does not train them.
    """
    choices = space.choices()
    if "model" in choices["compile"] and len(choices["memory_budget"]) > 1:
        return "nothing"
    return "compiled"


def forecaster_of(
    result: StudyResult,
    *,
    executor: LocalExecutor,
    compute_capability: str | None,
    torch_version: str | None,
) -> Forecaster:
    """Returns a forecaster for the study's device, or for a GPU of another compute capability.

    Raises InvalidInput if a compute capability is given and the study ran on a CPU: its workload
    has the defaults of a CPU, or if its code was not named on this machine.
    """
    check_trusted(result.workload, study=result.study, storage=result.storage, folder=result.folder)
    device = result.device
    if compute_capability is not None:
        if device.type == "cpu":
            raise InvalidInput(
                f"compute capability {compute_capability} is for a GPU, "
                f"but study {result.study!r} ran on cpu",
                hint="leave --compute-capability out, or describe the model by its options "
                "instead of --study",
            )
        if compute_capability != device.compute_capability:
            another = PredictedDevice(type=device.type, compute_capability=compute_capability)
            return Forecaster.for_device(
                another, executor=executor, workload=result.workload, torch_version=torch_version
            )
    return Forecaster.of_device(
        device, executor=executor, workload=result.workload, torch_version=torch_version
    )


def workload_of(
    device_type: str, settings: Mapping[str, Any], *, space: SearchSpace | None = None
) -> Workload:
    """Returns the workload that a search with these settings would train. Raises InvalidInput."""
    workload = make_workload(device_type, {} if space is None else space.workload, settings)
    check_name(workload.dataset)
    return workload


def workload_with(
    device_type: str,
    settings: Mapping[str, Any],
    configuration: Mapping[str, Any],
    *,
    space: SearchSpace | None,
) -> Workload:
    """Returns the workload of settings, for a configuration or the configurations of a space.

    Raises InvalidInput, also where the configuration of the options is not legal for it.
    """
    workload = workload_of(device_type, settings, space=space)
    if space is None:
        config = configuration_of(configuration, workload.legality_context)
        check_legal(config, workload.legality_context)
    check_adapters(workload, [config.adapter] if space is None else space.choices()["adapter"])
    return workload
