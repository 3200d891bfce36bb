"""How large a model can be trained under a cap: by prediction and bisection, then confirmed by one real trial.

request.py   what is asked
varying.py   what may vary, and its values
largest.py   the bisection
ladder.py    techniques added one by one
confirm.py   the real trial
result.py    what was found
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from autotune.errors import InvalidInput, PredictionImpossible
from autotune.execution.local import LocalExecutor
from autotune.spec.config import TrainingConfig, broken_rules
from autotune.spec.prediction import Forecast
from autotune.spec.result import DeviceInfo
from autotune.spec.search_space import bind_space
from autotune.spec.workload import Workload
from autotune.study.fit.confirm import confirm, why_not
from autotune.study.fit.largest import Largest, find_largest
from autotune.study.fit.request import FitRequest
from autotune.study.fit.result import Confirmation, FitResult, FitRow
from autotune.study.fit.varying import Varying
from autotune.study.predictions import Forecaster, device_there, predicted_device_of
from autotune.units import format_size

__all__ = ["FitProgress", "FitRequest", "fit"]


@dataclass(frozen=True, kw_only=True)
class FitProgress:
    """What is being done, or has been found."""

    what: str
    is_found: bool = False


Listener = Callable[[FitProgress], None]


def fit(request: FitRequest, *, listener: Listener = lambda _: None) -> FitResult:
    """Leaves nothing behind. Raises InvalidInput.

    Of a space it is the configuration with the largest value: every other one was predicted to be
    too large at the next value, or at a smaller one, so that it cannot do better unless its memory
    shrinks while the value grows.
    """

    def note(sentence: str) -> None:
        listener(FitProgress(what=sentence))

    with TemporaryDirectory() as name, LocalExecutor(Path(name), note=note) as executor:
        device_type, compute_capability = predicted_device_of(
            request.device, compute_capability=request.compute_capability, executor=executor
        )
        search = _Search(
            executor=executor,
            request=request,
            device_type=device_type,
            compute_capability=compute_capability,
            listener=listener,
        )
        devices = executor.devices()
        device = device_there(
            request.device or device_type, devices, compute_capability=request.compute_capability
        )
        rows = search.ladder() if request.space is None else [search.best_of_space(device)]
        found = FitResult(
            varying=search.varying,
            cap_bytes=request.cap_bytes,
            context_bytes=search.context_bytes,
            device_type=device_type,
            compute_capability=compute_capability,
            torch_version=request.torch_version,
            rows=tuple(rows),
        )
        return search.confirmed(found, device=device, host=devices[-1], folder=Path(name))


@dataclass(kw_only=True)
class _Search:
    executor: LocalExecutor
    request: FitRequest
    device_type: str
    compute_capability: str | None
    listener: Listener
    varying: Varying = field(init=False)
    context_bytes: int = field(init=False)
    _forecasters: dict[str, Forecaster] = field(default_factory=dict)
    _predicted: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.varying = self.request.varying(self.device_type)
        self.context_bytes = self.request.context_bytes if self.device_type == "cuda" else 0

    # -- which configurations ----------------------------------------------------------------------

    def ladder(self) -> list[FitRow]:
        """A row a rung, or the one row of a configuration."""
        return [
            self._row(rung.name, rung.config, start=self.varying.start(rung.config))[0]
            for rung in self.request.rungs(self.varying)
        ]

    def best_of_space(self, device: DeviceInfo | None) -> FitRow:
        """In rounds: all at one value; of those that fit, the smallest grows; the others must fit at the value after.

        Where none fits, the smallest shrinks instead. What cannot be predicted is left out, and
        counted.
        """
        assert self.request.space is not None
        contenders = self._configurations(device)
        technique = f"best of {len(contenders)} in space {self.request.space.name}"
        value: int | None = self.varying.start(contenders[0])
        best: FitRow | None = None
        excluded = 0
        while contenders and value is not None:
            forecasts = self._forecast_all(contenders, value)
            known = sorted(
                (one for one in forecasts if one.prediction is not None), key=self._needed
            )
            excluded += len(forecasts) - len(known)
            fitting = [one for one in known if self._needed(one) <= self.request.cap_bytes]
            if not known or (best is not None and best.value is not None and not fitting):
                break
            first, *others = fitting or known
            row, value = self._row(technique, first.config, start=value)
            best = row if best is None or row.value is not None else best
            contenders = [one.config for one in others]
        if best is None:
            raise PredictionImpossible(
                f"none of the configurations of space {self.request.space.name!r} can be predicted",
                hint="predict one of them by its options to see why",
            )
        message = f"{best.message}; {excluded} could not be predicted" if excluded else best.message
        return replace(best, predictions_made=len(self._predicted), message=message)

    def _configurations(self, device: DeviceInfo | None) -> list[TrainingConfig]:
        """The space's legal ones; a micro batch that varies is none of its choices."""
        assert self.request.space is not None
        space, workload = self.request.space, self.varying.workload
        unavailable = (
            {} if device is None else self.executor.probe(device.device, space.choices())[1]
        )
        legal = bind_space(space, workload.circumstances, unavailable=unavailable)
        configs = [*legal.configurations(), *legal.named.values()]
        if self.varying.vary == "micro-batch":
            configs = [
                replace(config, micro_batch_size=workload.global_batch) for config in configs
            ]
        return list({config.fingerprint: config for config in configs}.values())

    # -- one configuration -------------------------------------------------------------------------

    def _row(
        self, technique: str, config: TrainingConfig, *, start: int
    ) -> tuple[FitRow, int | None]:
        """The row, and the next value: None where there is none or nothing is known."""
        predicted_before = len(self._predicted)
        values, end = self.varying.legal_values(config)

        def need(value: int) -> int:
            needed = self._needed(self._forecast(*self.varying.at(value, config)))
            self._say(f"{technique}: {self.varying.describe(value)} may need {format_size(needed)}")
            return needed

        self._say(f"{technique}: predicting {config.describe()}")
        try:
            found = find_largest(need, cap=self.request.cap_bytes, values=values, start=start)
        except PredictionImpossible as error:
            found = Largest(value=None, successor=None, needs={})
            message = error.message
        else:
            message = self._why_no_more(found, end)
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
        reason = f"{self.varying.describe(found.successor)} may need {format_size(found.needs[found.successor])}"
        return reason if found.value is not None else f"does not fit: {reason}"

    # -- predictions -------------------------------------------------------------------------------

    def _forecast(self, workload: Workload, config: TrainingConfig) -> Forecast:
        self._predicted.add((workload.fingerprint, config.fingerprint))
        return self._forecaster(workload).forecast(config)

    def _forecast_all(self, configs: Sequence[TrainingConfig], value: int) -> list[Forecast]:
        """Of the configurations that are legal at `value`."""
        ended: list[Forecast] = []

        def note(forecast: Forecast) -> None:
            ended.append(forecast)
            self._say(
                f"{len(ended)} of {len(new)} configurations predicted at {self.varying.describe(value)}"
            )

        workloads, chosen = zip(
            *(self.varying.at(value, config) for config in configs), strict=True
        )
        workload = workloads[0]
        legal = [
            config
            for config in chosen
            if not broken_rules(config.to_dict(), workload.circumstances)
        ]
        new = [c for c in legal if (workload.fingerprint, c.fingerprint) not in self._predicted]
        self._forecaster(workload).forecast_all(new, on_each=note)
        return [self._forecast(workload, config) for config in legal]

    def _forecaster(self, workload: Workload) -> Forecaster:
        return self._forecasters.setdefault(
            workload.fingerprint,
            Forecaster(
                executor=self.executor,
                workload=workload,
                device_type=self.device_type,
                compute_capability=self.compute_capability,
                torch_version=self.request.torch_version,
            ),
        )

    def _needed(self, forecast: Forecast) -> int:
        """What the device must have. Raises PredictionImpossible."""
        if forecast.prediction is None:
            raise PredictionImpossible(forecast.refusal)
        return forecast.prediction.upper_bound_bytes + self.context_bytes

    # -- the real trial ----------------------------------------------------------------------------

    def confirmed(
        self, found: FitResult, *, device: DeviceInfo | None, host: DeviceInfo, folder: Path
    ) -> FitResult:
        """`found` with one real trial of its largest value, or with the reason why there is none."""
        best = found.best
        if best is None or best.value is None or best.prediction is None:
            return replace(found, not_confirmed="nothing fits")
        if not self.request.confirms:
            return replace(found, not_confirmed="not asked for")
        if device is None:
            name = self.request.device or self.device_type
            if self.request.compute_capability is not None:
                name += f" of compute capability {self.request.compute_capability}"
            return replace(
                found, not_confirmed=f"there is no device {name} here: these are predictions only"
            )
        needed = best.prediction.upper_bound_bytes + self.context_bytes
        if reason := why_not(best.prediction, needed_bytes=needed, device=device, host=host):
            return replace(found, not_confirmed=reason)
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
                cap_bytes=self.request.cap_bytes,
                folder=folder / "confirm",
            )
        except InvalidInput as error:  # a text too short for such sequences, or not to be had
            return replace(found, not_confirmed=error.message)
        return replace(
            found, confirmed=Confirmation(row=best, device=device, measurement=measurement)
        )

    def _say_found(self, row: FitRow) -> None:
        value = "nothing" if row.value is None else self.varying.describe(row.value)
        self.listener(FitProgress(what=f"{row.technique}: {value} ({row.message})", is_found=True))

    def _say(self, what: str) -> None:
        self.listener(FitProgress(what=what))
