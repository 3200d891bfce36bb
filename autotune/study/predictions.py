"""Predictions for a workload: one configuration, or every one of a space, several at a time in warm processes."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from autotune.data.sources import check_name
from autotune.errors import InvalidInput, PredictionImpossible, PreparationFailed
from autotune.execution.local import LocalExecutor
from autotune.spec.config import TrainingConfig, check_legal
from autotune.spec.prediction import Forecast, Prediction, check_release, parse_compute_capability
from autotune.spec.result import DeviceInfo
from autotune.spec.search_space import SearchSpace
from autotune.spec.workload import DEFAULTS_BY_DEVICE, Workload, make_workload


@dataclass(kw_only=True)
class Forecaster:
    """Predicts configurations of one workload on one kind of device; what was predicted once is kept."""

    executor: LocalExecutor
    workload: Workload
    device_type: str
    """cpu or cuda; a CUDA device need not be there."""
    compute_capability: str | None = None
    """Of the GPU that is meant, such as 9.0; None: one is assumed, and a note of the prediction
    says which."""
    torch_version: str | None = None
    """The torch release whose CUDA kernels are meant; None: the one that is installed."""
    _known: dict[str, Forecast] = field(default_factory=dict)

    @classmethod
    def of_device(
        cls,
        device: DeviceInfo,
        *,
        executor: LocalExecutor,
        workload: Workload,
        torch_version: str | None = None,
    ) -> "Forecaster":
        """Returns one for the very GPU, or the CPU, that `device` describes: a study's own, which need not be there."""
        return cls(
            executor=executor,
            workload=workload,
            device_type=device.type,
            compute_capability=device.compute_capability,
            torch_version=torch_version,
        )

    def __post_init__(self) -> None:
        check_release(self.torch_version)
        if self.compute_capability is not None:
            parse_compute_capability(self.compute_capability)

    def predict(self, config: TrainingConfig, *, with_timeline: bool = False) -> Prediction:
        """Raises PredictionImpossible and IllegalConfiguration."""
        workload = self.workload
        check_legal(config, workload.circumstances)
        future = self._submit(config, with_timeline=with_timeline)
        return self._result(future)

    def forecast(self, config: TrainingConfig) -> Forecast:
        """As `predict`, with the reason in place of an error; asked twice it answers from memory."""
        if config.fingerprint not in self._known:
            self._known[config.fingerprint] = _outcome(config, partial(self.predict, config))
        return self._known[config.fingerprint]

    def forecast_all(
        self,
        configs: Iterable[TrainingConfig],
        *,
        on_each: Callable[[Forecast], None] = lambda _: None,
    ) -> list[Forecast]:
        """Every configuration's forecast in the order they ended, as many at a time as there are processors."""
        waiting = list(configs)[::-1]
        running: dict[Future[Any], TrainingConfig] = {}
        ended: list[Forecast] = []
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                config = waiting.pop()
                running[self._submit(config)] = config
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                config = running.pop(future)
                ended.append(_outcome(config, partial(self._result, future)))
                self._known[config.fingerprint] = ended[-1]
                on_each(ended[-1])
        return ended

    def _result(self, future: "Future[Any]") -> Prediction:
        return Prediction.from_dict(self.executor.wait_for(future).result)

    def _submit(self, config: TrainingConfig, *, with_timeline: bool = False) -> "Future[Any]":
        return self.executor.submit_prediction(
            self.workload,
            config,
            device_type=self.device_type,
            compute_capability=self.compute_capability,
            torch_version=self.torch_version,
            with_timeline=with_timeline,
        )


def _outcome(config: TrainingConfig, predict: Callable[[], Prediction]) -> Forecast:
    try:
        return Forecast(config=config, prediction=predict())
    except (PredictionImpossible, PreparationFailed) as error:
        return Forecast(config=config, refusal=error.message)


Made = TypeVar("Made")


def on_some_device(device: str | None, make: Callable[[str], Made]) -> Made:
    """What `make` makes of the first kind of device for which it can: which there is, is not known yet.

    Raises InvalidInput where there is none.
    """
    refusals = []
    for device_type in DEFAULTS_BY_DEVICE if device is None else [device.partition(":")[0]]:
        try:
            return make(device_type)
        except InvalidInput as error:
            refusals.append(error)
    raise refusals[0]


def device_meant(device: str | None, compute_capability: str | None) -> str | None:
    """Returns `device`, or cuda where no device is named and a compute capability says that a GPU is meant.

    Raises InvalidInput for a text that is not a compute capability, and for a compute capability of
    a CPU.
    """
    if compute_capability is None:
        return device
    parse_compute_capability(compute_capability)
    if device == "cpu":
        raise InvalidInput(
            f"compute capability {compute_capability} is a GPU's, and the device is cpu",
            hint="leave one of them out",
        )
    return device or "cuda"


def predicted_device_of(
    device: str | None, *, compute_capability: str | None = None, executor: LocalExecutor
) -> tuple[str, str | None]:
    """Returns the kind, cpu or cuda, and the compute capability of `device`; None is a GPU where there is one.

    The device need not be there: `compute_capability`, such as 9.0, then describes the GPU that is
    meant. The second value is None for a CPU, and for a GPU that is neither there nor described.
    Raises InvalidInput.
    """
    device = device_meant(device, compute_capability)
    if compute_capability is not None:
        return "cuda", compute_capability
    return ("cpu", None) if device == "cpu" else kind_and_capability(device, executor.devices())


def kind_and_capability(name: str | None, devices: Sequence[DeviceInfo]) -> tuple[str, str | None]:
    """Returns the kind, cpu or cuda, and the compute capability of a device of `devices`, which are all that are there.

    The compute capability is None for a CPU and for a device that is not there. `name` is as in
    `device_there`.
    """
    device = device_there(name, devices)
    if device is not None:
        return device.type, device.compute_capability
    assert name is not None, "the CPU is always there"
    return name.partition(":")[0], None


def device_there(
    name: str | None, devices: Sequence[DeviceInfo], *, compute_capability: str | None = None
) -> DeviceInfo | None:
    """Returns the first of `devices` that is called `name` or is of that kind; None as a name is the first of all.

    Where a compute capability is given, only devices of that one count.
    """
    for info in devices:
        is_meant = compute_capability is None or info.compute_capability == compute_capability
        if is_meant and name in (None, info.device, info.type):
            return info
    return None


def workload_of(
    device_type: str, settings: Mapping[str, Any], *, space: SearchSpace | None = None
) -> Workload:
    """The workload that a search with these settings would train. Raises InvalidInput."""
    workload = make_workload(device_type, {} if space is None else space.workload, settings)
    check_name(workload.dataset)
    return workload
