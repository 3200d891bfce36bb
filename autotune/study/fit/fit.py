"""Finds how large a model can be trained under a cap, by predictions and bisection.

The result is confirmed by one real trial.

request.py    the request
varying.py    the size that varies, and its values
ablation.py   techniques added one by one
confirm.py    the real trial
result.py     the result
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from autotune.analysis.largest import Largest, find_largest, find_smallest
from autotune.errors import InvalidInput, PredictionImpossible
from autotune.execution.local import LocalExecutor
from autotune.execution.tasks import ListDevices
from autotune.spec.config import TrainingConfig, rule_violations
from autotune.spec.prediction import Forecast
from autotune.spec.result import DeviceInfo
from autotune.spec.search_space import bind_space
from autotune.spec.workload import Workload
from autotune.study.fit.confirm import confirm, why_not
from autotune.study.fit.request import FitRequest
from autotune.study.fit.result import FitResult, FitRow, RealTrial
from autotune.study.fit.varying import Varying
from autotune.study.prediction.predicted_device import PredictedDevice, predicted_device_of
from autotune.study.prediction.predictions import Forecaster
from autotune.units import format_size

__all__ = ["FitProgress", "FitRequest", "fit"]


@dataclass(frozen=True, kw_only=True)
class FitProgress:
    """What `fit` is doing, or has found."""

    what: str
    is_lasting: bool = False
    """Whether it is to be read later, too: what was found, and what this machine is waiting for."""


Listener = Callable[[FitProgress], None]


def fit(request: FitRequest, *, listener: Listener = lambda _: None) -> FitResult:
    """Returns the largest value that fits, for each step of the ablation or the best of a space.

    The best of a space is the configuration with the largest value: every other one was predicted
    to be too large at the next value, or at a smaller one, so it cannot do better unless its memory
    shrinks while the value grows. Leaves no files behind. Raises InvalidInput.
    """

    def note(sentence: str) -> None:
        listener(FitProgress(what=sentence, is_lasting=True))

    with (
        TemporaryDirectory() as name,
        LocalExecutor(Path(name), note=note, only_predicts=True) as executor,
    ):
        predicted = predicted_device_of(
            request.device,
            compute_capability=request.compute_capability,
            executor=executor,
            storage=request.storage,
        )
        search = _Search(executor=executor, request=request, predicted=predicted, listener=listener)
        devices = executor.run(ListDevices())
        device = predicted.found_in(devices)
        rows = search.ablation() if request.space is None else [search.best_of_space(device)]
        found = FitResult(
            varying=search.varying,
            cap_bytes=search.cap_bytes,
            context_bytes=search.context_bytes,
            device_type=predicted.type,
            compute_capability=predicted.compute_capability,
            torch_version=request.torch_version,
            rows=tuple(rows),
        )
        return search.confirmed(found, device=device, host=devices[-1], folder=Path(name))


@dataclass(kw_only=True)
class _Search:
    executor: LocalExecutor
    request: FitRequest
    predicted: PredictedDevice
    listener: Listener
    varying: Varying = field(init=False)
    context_bytes: int = field(init=False)
    cap_bytes: int = field(init=False)
    _forecasters: dict[str, Forecaster] = field(default_factory=dict)
    _predicted: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.varying = self.request.varying(self.predicted.type)
        self.context_bytes = self.request.context_bytes_on(self.predicted.type)
        assert self.request.max_mem is not None  # without a study there is one
        self.cap_bytes = self.request.max_mem

    # -- which configurations ----------------------------------------------------------------------

    def ablation(self) -> list[FitRow]:
        """Returns one row for each step of the ablation, or for the one configuration."""
        rows = []
        for step in self.request.steps(self.varying):
            row, _ = self._row(step.name, step.config, start=self.varying.start(step.config))
            rows.append(row)
        return rows

    def best_of_space(self, device: DeviceInfo | None) -> FitRow:
        """Returns the row of the configuration with the largest value.

        Each round predicts all candidates at one value. Of those that fit, the one of least memory
        is bisected; the others stay candidates if they fit at the value after. If none fits, the
        one of least memory is bisected downwards. Configurations that cannot be predicted are
        excluded, and counted.
        """
        space = self.request.search_space
        assert space is not None
        candidates = self._configurations(device)
        technique = f"best of {len(candidates)} in space {space.name}"
        which = "legal" if self.request.try_all else "named"
        self.listener(
            FitProgress(
                what=f"predicting the {len(candidates)} {which} configurations of space "
                f"{space.name}, one after the other",
                is_lasting=True,
            )
        )
        value: int | None = self.varying.start(candidates[0])
        best: FitRow | None = None
        excluded = 0
        while candidates and value is not None:
            forecasts = self._forecast_all(candidates, value)
            predicted = [forecast for forecast in forecasts if forecast.prediction is not None]
            predicted.sort(key=self._needed)
            excluded += len(forecasts) - len(predicted)
            fitting = [
                forecast for forecast in predicted if self._needed(forecast) <= self.cap_bytes
            ]
            if not predicted or (best is not None and best.value is not None and not fitting):
                break
            first, *others = fitting or predicted
            row, value = self._row(technique, first.config, start=value)
            if best is None or row.value is not None:
                best = row
            candidates = [forecast.config for forecast in others]
        if best is None:
            raise PredictionImpossible(
                f"none of the configurations of space {space.name!r} can be predicted",
                hint="predict one of them by its options to see why",
            )
        message = f"{best.message}; {excluded} could not be predicted" if excluded else best.message
        return replace(best, predictions_made=len(self._predicted), message=message)

    def _configurations(self, device: DeviceInfo | None) -> list[TrainingConfig]:
        """Returns the legal configurations that the space names, or all, without duplicates.

        All also where it names none that is legal. With a varying micro batch or rank, the space's
        choices of it do not apply.
        """
        space = self.request.search_space
        assert space is not None
        workload = self.varying.workload
        unavailable: dict[str, dict[str, str]] = {}
        if device is not None:
            _, unavailable = self.executor.probe(device.device, space.choices())
        legal = bind_space(space, workload.legality_context, unavailable=unavailable)
        configs = list(legal.named.values())
        if self.request.try_all or not configs:
            configs = [*legal.listed(), *configs]
        if self.varying.vary == "micro-batch":
            configs = [
                replace(config, micro_batch_size=workload.global_batch) for config in configs
            ]
        if self.varying.vary == "rank":
            configs = [
                replace(config, adapter_rank=TrainingConfig().adapter_rank)
                for config in configs
                if config.adapter != "none"
            ]
            if not configs:
                raise InvalidInput(
                    f"no configuration of space {space.name!r} has an adapter whose rank can vary",
                    hint="use --space finetune, or --adapter lora without a space",
                )
        return list({config.fingerprint: config for config in configs}.values())

    # -- one configuration -------------------------------------------------------------------------

    def _row(
        self, technique: str, config: TrainingConfig, *, start: int
    ) -> tuple[FitRow, int | None]:
        """Returns the configuration's row, and the value after its largest, None if unknown."""
        predicted_before = len(self._predicted)
        values, end = self.varying.legal_values(config)
        impossible: dict[int, str] = {}

        def need(value: int) -> int:
            forecast = self._forecast(*self.varying.at(value, config))
            if self.varying.vary == "rank" and value > start and forecast.prediction is None:
                impossible[value] = forecast.error  # larger than one of the model's layers
                return sys.maxsize
            needed = self._needed(forecast)
            self._say(f"{technique}: {self._need_of(value, needed)}")
            return needed

        self._say(f"{technique}: predicting {config.describe()}")
        try:
            find = find_smallest if self.varying.wants_fewest else find_largest
            found = find(need, cap=self.cap_bytes, values=values, start=start)
        except PredictionImpossible as error:
            found = Largest(value=None, successor=None, needs={})
            message = error.message
        else:
            message = impossible.get(found.successor or 0) or self._why_no_more(found, end)
        made = len(self._predicted) - predicted_before
        row = FitRow(technique=technique, config=config, predictions_made=made, message=message)
        if found.value is not None:
            workload, chosen = self.varying.at(found.value, config)
            prediction = self._forecast(workload, chosen).prediction
            row = replace(row, config=chosen, value=found.value, prediction=prediction)
        self._say_found(row)
        return row, found.successor

    def _why_no_more(self, found: Largest, end: str) -> str:
        if found.successor is None:
            return end
        reason = self._need_of(found.successor, found.needs[found.successor])
        return reason if found.value is not None else f"does not fit: {reason}"

    def _need_of(self, value: int, needed_bytes: int) -> str:
        return need_text(
            self.varying.describe(value),
            needed_bytes,
            cap_bytes=self.cap_bytes,
            context_bytes=self.context_bytes,
        )

    # -- predictions -------------------------------------------------------------------------------

    def _forecast(self, workload: Workload, config: TrainingConfig) -> Forecast:
        self._predicted.add((workload.fingerprint, config.fingerprint))
        return self._forecaster(workload).forecast(config)

    def _forecast_all(self, configs: Sequence[TrainingConfig], value: int) -> list[Forecast]:
        """Returns the forecasts of the configurations that are legal at `value`."""
        ended: list[Forecast] = []

        def note(forecast: Forecast) -> None:
            ended.append(forecast)
            self._say(
                f"{len(ended)} of {len(new)} configurations predicted at "
                f"{self.varying.describe(value)}"
            )

        workload, _ = self.varying.at(value, configs[0])
        legal = []
        for config in configs:
            _, at_value = self.varying.at(value, config)
            if not rule_violations(at_value.to_dict(), workload.legality_context):
                legal.append(at_value)
        new = [c for c in legal if (workload.fingerprint, c.fingerprint) not in self._predicted]
        self._forecaster(workload).forecast_all(new, on_each=note)
        return [self._forecast(workload, config) for config in legal]

    def _forecaster(self, workload: Workload) -> Forecaster:
        return self._forecasters.setdefault(
            workload.fingerprint,
            Forecaster.for_device(
                self.predicted,
                executor=self.executor,
                workload=workload,
                torch_version=self.request.torch_version,
                extrapolates="any",
            ),
        )

    def _needed(self, forecast: Forecast) -> int:
        """Returns the bytes that the device must have. Raises PredictionImpossible."""
        if forecast.prediction is None:
            raise PredictionImpossible(forecast.error)
        return forecast.prediction.upper_bound_bytes + self.context_bytes

    # -- the real trial ----------------------------------------------------------------------------

    def confirmed(
        self, found: FitResult, *, device: DeviceInfo | None, host: DeviceInfo, folder: Path
    ) -> FitResult:
        """Returns `found` with one real trial of its largest value, or why there is none."""
        best = found.best
        if best is None or best.value is None or best.prediction is None:
            return replace(found, not_confirmed="nothing fits")
        if not self.request.confirm:
            return replace(found, not_confirmed="not asked for")
        if device is None:
            name = self.request.device or self.predicted.type
            if self.request.compute_capability is not None:
                name += f" of compute capability {self.request.compute_capability}"
            return replace(
                found, not_confirmed=f"there is no device {name} here: these are predictions only"
            )
        needed = best.prediction.upper_bound_bytes + self.context_bytes
        if reason := why_not(best.prediction, needed_bytes=needed, device=device, host=host):
            return replace(found, not_confirmed=reason)
        needed_devices = best.prediction.devices
        there = sum(one.type == "cuda" for one in self.executor.run(ListDevices()))
        if device.type == "cuda" and needed_devices > there:
            return replace(
                found,
                not_confirmed=f"a trial needs {needed_devices} GPUs, and this machine has {there}",
            )
        self._say(
            f"training {best.technique} with {self.varying.describe(best.value)} for a few steps"
        )
        workload, config = self.varying.at(best.value, best.config)
        try:
            measurement = confirm(
                workload,
                config,
                executor=self.executor,
                device=device,
                cap_bytes=self.cap_bytes,
                folder=folder / "confirm",
            )
        except InvalidInput as error:  # the text is too short for such sequences, or not available
            return replace(found, not_confirmed=error.message)
        return replace(found, confirmed=RealTrial(row=best, device=device, measurement=measurement))

    def _say_found(self, row: FitRow) -> None:
        value = "nothing" if row.value is None else self.varying.describe(row.value)
        self.listener(
            FitProgress(what=f"{row.technique}: {value} ({row.message})", is_lasting=True)
        )

    def _say(self, what: str) -> None:
        self.listener(FitProgress(what=what))


def need_text(described: str, needed_bytes: int, *, cap_bytes: int, context_bytes: int) -> str:
    """Returns `26 layers would need up to 96.57 MiB`: the upper bound of the prediction.

    The CUDA context, which is in no predicted peak, is named.
    """
    need = format_size(needed_bytes)
    if needed_bytes > cap_bytes and need == format_size(cap_bytes):
        need = f"a little more than {need}"
    text = f"{described} would need up to {need}"
    if context_bytes:
        text += f", {format_size(context_bytes)} of it for the context"
    return text
