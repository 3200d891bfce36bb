"""Dry run: what a search would do, with predicted peaks; how long it would take on request.

Nothing is trained unless the time is asked for. Then one short training is run for each precision,
and one that compiles.
"""

import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from autotune.errors import InvalidInput, Stopped, UnknownStudy
from autotune.execution.local import LocalExecutor
from autotune.execution.tasks import Train
from autotune.spec.cap import is_over_cap
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Forecast
from autotune.spec.result import Measurement
from autotune.spec.search_space import LegalSpace, SearchSpace
from autotune.spec.study import MOST_TRIALS_IN_TIME, StudyDefinition
from autotune.spec.workload import MEMORY_STEPS, MINIMUM_TIMED_STEPS, SHORT_TIMED_STEPS, Workload
from autotune.storage.store import StudyStore
from autotune.study.events import Event, Listener, Preparing
from autotune.study.opening.new_study import new_definition
from autotune.study.opening.requested_space import of_each_trial, space_of
from autotune.study.opening.reuse import ReusedResults, reuse
from autotune.study.opening.work_folder import work_folder
from autotune.study.prediction.predictions import Forecaster
from autotune.study.request import VARIANTS_SHARE, SearchRequest
from autotune.study.running.devices_of_search import devices_of
from autotune.study.running.places import ThreadedListener
from autotune.study.running.trial_runner import possible_representatives

_WARMUP_STEPS = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `search` would do."""

    definition: StudyDefinition
    legal: LegalSpace
    configurations: int
    """Number of legal configurations, the named ones included."""
    trials_wanted: int
    """Number of trials to run, without the reused ones."""
    ends_by_time: bool
    """Whether as many trials are run as the time budget allows."""
    trials_at_once: int
    """Number of places of the search, such as one for each of its devices."""
    reused: Mapping[str, int]
    """Number of results that would be reused from each earlier study."""
    first: tuple[tuple[str, TrainingConfig], ...]
    """The baseline and the named configurations that are not reused, each with its name."""
    forecasts: Mapping[str, Forecast]
    """Predictions of the first trials that do not compile, by the fingerprint of the configuration;
    empty for a script and for a search without predictions."""
    reused_baseline_bytes: int | None
    """Peak memory of the baseline where its result would be reused; None where it is tried."""
    is_timed: bool
    """Whether short trainings were run to time the trials."""
    earlier_seconds: tuple[float, ...]
    """Wall-clock seconds of the trials of the studies that results are reused from."""
    seconds_by_precision: Mapping[str, float]
    """Wall-clock seconds of an eager trial to the end; without the precisions whose short training
    did not finish, and empty unless timed, as all times below."""
    shared_seconds_by_precision: Mapping[str, float]
    """Wall-clock seconds of an eager trial that measures memory and speed only."""
    full_trainings: int
    """Number of trials that are trained to the end: one of each numerics class."""
    compile_seconds: float | None
    """Seconds that compiling adds to a trial; None if nothing in the space compiles, or the short
    training did not finish."""
    share_by_precision: Mapping[str, float]
    """Share of the legal configurations that have each precision."""
    compiled_share: float
    """Share of the legal configurations that compile."""
    confirm_share: float
    """Largest share of the search's time for measuring the finalists again; 0 without."""
    variants_share: float
    """Largest share for measuring the pick without each of its techniques; 0 without."""
    default_time_budget_seconds: float | None
    """The time budget that applies because the request does not say when to end."""
    seconds_for_trials: float | None
    """The part of the time budget in which trials begin; None without a budget."""

    @property
    def confirm_seconds(self) -> float | None:
        """Most seconds for measuring the finalists again; None when those of trials are unknown."""
        return self._seconds_of(self.confirm_share)

    @property
    def variants_seconds(self) -> float | None:
        """Most seconds for measuring the pick without each of its techniques; None as above."""
        return self._seconds_of(self.variants_share)

    def _seconds_of(self, share: float) -> float | None:
        if self.seconds is None:
            return None
        return share * self.seconds / (1.0 - self.confirm_share - self.variants_share)

    @property
    def seconds(self) -> float | None:
        """Seconds until all trials have run, or the time is over; None when nothing is known.

        Timed, they are those of trials drawn evenly from the space; otherwise each trial takes the
        mean of the earlier studies' trials.
        """
        if not self.is_timed and self.earlier_seconds:
            return self._in_time(
                self.trials_wanted * fmean(self.earlier_seconds) / self.trials_at_once
            )
        full = self._mean(self.seconds_by_precision)
        shared = self._mean(self.shared_seconds_by_precision)
        if full is None or shared is None:
            return None
        compile_seconds = self.trials_wanted * self.compiled_share * (self.compile_seconds or 0.0)
        shared_trainings = self.trials_wanted - self.full_trainings
        total = self.full_trainings * full + shared_trainings * shared + compile_seconds
        return self._in_time(total / self.trials_at_once)

    def _in_time(self, seconds: float) -> float:
        if not self.ends_by_time or self.seconds_for_trials is None:
            return seconds
        return min(seconds, self.seconds_for_trials)

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON object of the service's dry run; what is not known is null."""
        definition = self.definition
        return {
            "space": definition.space.name,
            "workload": definition.workload.describe(),
            "device": {
                "name": definition.device.name,
                "device": definition.device.device,
                "others": definition.device.others,
                "notes": list(definition.device.notes),
            },
            "cap_bytes": definition.cap_bytes,
            "cap": definition.describe_cap(),
            "configurations": self.configurations,
            "values": {field: list(values) for field, values in self.legal.values.items()},
            "excluded": list(self.legal.excluded),
            "trials_wanted": self.trials_wanted,
            "ends_by_time": self.ends_by_time,
            "trials_at_once": self.trials_at_once,
            "reused": dict(self.reused),
            "first": [self._first_to_dict(name, config) for name, config in self.first],
            "reused_baseline_bytes": self.reused_baseline_bytes,
            "seconds": self.seconds,
            "seconds_for_trials": _finite(self.seconds_for_trials),
            "default_time_budget_seconds": self.default_time_budget_seconds,
            "confirm_share": self.confirm_share,
            "confirm_seconds": self.confirm_seconds,
            "variants_share": self.variants_share,
            "variants_seconds": self.variants_seconds,
        }

    def _first_to_dict(self, name: str, config: TrainingConfig) -> dict[str, Any]:
        forecast = self.forecasts.get(config.fingerprint)
        prediction = None if forecast is None else forecast.prediction
        values = {
            "name": name,
            "label": config.describe(),
            "config": config.to_dict(),
            "is_baseline": config == self.definition.baseline_config(),
            "was_predicted": forecast is not None,
            "predicted_peak_memory_bytes": None,
            "predicted_tokens_per_second": None,
            "is_over_cap": None,
        }
        if prediction is not None:
            values["predicted_tokens_per_second"] = prediction.predicted_tokens_per_second
            values["predicted_peak_memory_bytes"] = prediction.peak_memory_bytes
            values["is_over_cap"] = is_over_cap(
                prediction.lower_bound_bytes, self.definition.cap_bytes
            )
        return values

    def _mean(self, seconds_by_precision: Mapping[str, float]) -> float | None:
        """Returns the mean over the timed precisions, weighted by their shares of the space."""
        timed_share = 0.0
        total = 0.0
        for precision, seconds in seconds_by_precision.items():
            timed_share += self.share_by_precision[precision]
            total += self.share_by_precision[precision] * seconds
        return total / timed_share if timed_share else None


def _finite(seconds: float | None) -> float | None:
    """Returns a number that JSON has: None for no limit."""
    return None if seconds is None or math.isinf(seconds) else seconds


def plan(
    request: SearchRequest,
    *,
    time_trials: bool = False,
    space: SearchSpace | None = None,
    listener: Listener = lambda event: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Plan:
    """Returns what a new study of this request would do; no study is created.

    With `time_trials`, runs short trainings to estimate the time; otherwise trains nothing.
    `space` is what `space_of(request)` has returned, where that was called already.

    Raises InvalidInput for any invalid part of the request and for a study that exists, and Stopped
    once `should_stop` returns True.
    """
    if space is None:
        space = space_of(request)

    def begin_step(event: Event) -> None:
        # A fast machine may never have to wait, which is when the executor looks.
        if should_stop():
            raise Stopped("the dry run was stopped", hint="run the same command again")
        listener(event)

    with suppress(UnknownStudy), closing(StudyStore(request.storage)) as store:  # or none yet
        if request.name is not None and store.has_study(request.name):
            raise InvalidInput(
                f"a dry run is of a new study, and there is a study {request.name!r}",
                hint=f"autotune show {request.name} has what was tried; leave --dry-run out to "
                "continue it",
            )
    with (
        work_folder(request.storage) as work,
        devices_of(
            request,
            work,
            make_executor=LocalExecutor,
            should_stop=should_stop,
            listener=ThreadedListener(listener),
        ) as devices,
    ):
        request = devices.choose(
            request,
            devices_per_trial=of_each_trial("devices_per_trial", request, space),
            nodes_per_trial=of_each_trial("nodes_per_trial", request, space),
            stored=None,
            is_confirmation=False,
        )
        executor = devices.executor
        named = replace(request, name=f"plan-{time.time_ns()}")
        new = new_definition(named, space=space, executor=executor, work=work, listener=begin_step)
        folder = work / new.definition.name
        try:
            new.settle(folder)
            reused, earlier_seconds = _would_be_reused(new.definition, request)
            return _plan(
                new.definition,
                request,
                reused,
                trials_at_once=devices.trials_at_once,
                earlier_seconds=earlier_seconds,
                executor=executor,
                folder=folder,
                listener=begin_step,
                time_trials=time_trials,
            )
        finally:
            new.discard()
            shutil.rmtree(folder, ignore_errors=True)


def _would_be_reused(
    definition: StudyDefinition, request: SearchRequest
) -> tuple[ReusedResults, tuple[float, ...]]:
    """Returns the results to reuse, and the seconds of the trials of the studies they are from."""
    try:
        store = StudyStore(request.storage)
    except UnknownStudy:  # no database yet
        return ReusedResults(), ()
    try:
        reused = reuse(store, definition, request)
        seconds = []
        for study in reused.counts:
            for record in store.trials(study):
                if record.seconds is not None:
                    seconds.append(record.seconds)
        return reused, tuple(seconds)
    finally:
        store.close()


def _plan(
    definition: StudyDefinition,
    request: SearchRequest,
    reused: ReusedResults,
    *,
    trials_at_once: int,
    earlier_seconds: tuple[float, ...],
    executor: LocalExecutor,
    folder: Path,
    listener: Listener,
    time_trials: bool,
) -> Plan:
    most_trials = request.new_trials(definition.device.type)
    default_budget = request.default_time_budget_seconds(definition.device.type)
    if default_budget is not None:
        request = replace(request, time_budget=default_budget)
    legal = definition.legal_space()
    configurations = [*legal.sample(), *legal.named_outside.values()]
    baseline = definition.baseline_config()
    precisions = Counter(config.precision for config in configurations)
    compiled = [config for config in configurations if config.compile != "none"]

    def short_training(config: TrainingConfig) -> Measurement:
        listener(Preparing(what=f"timing a few steps of {config.describe()}"))
        with executor.slot_on(definition.device):
            training = executor.training(
                definition,
                config,
                study_folder=folder,
                enforce_cap=False,
                workload=replace(
                    definition.workload,
                    warmup_steps=_WARMUP_STEPS,
                    steps=_WARMUP_STEPS + MEMORY_STEPS + MINIMUM_TIMED_STEPS,
                    evaluation_sequences=1,
                ),
            )
            limits = request.trial_options.time_limits()
            task = Train(training=training)
            return executor.run(task, log_name="plan", limits=limits).measurement

    finished: dict[str, Measurement] = {}
    compile_seconds = None
    if time_trials:
        for precision in precisions:
            measurement = short_training(replace(baseline, precision=precision))
            if measurement.tokens_per_second is not None:
                finished[precision] = measurement
        if compiled:
            compile_seconds = short_training(compiled[0]).compile_seconds
    known = {record.config.fingerprint for record in reused.records}
    remaining = [c for c in [baseline, *configurations] if c.fingerprint not in known]
    outside = [config for _, config in definition.first_configurations() if config not in legal]
    # What is reused is of the space or one of the first.
    wanted = min(most_trials, legal.count() + len(outside) - len(known))
    steps = definition.workload.steps
    represented = {
        record.config.numerics_class
        for record in reused.records
        if possible_representatives(record.config, [record], steps=steps)
    }
    classes = len({config.numerics_class for config in remaining} - represented)
    named = [("baseline", baseline), *legal.named.items()]
    first = {c.fingerprint: (name, c) for name, c in named if c.fingerprint not in known}
    forecasts: dict[str, Forecast] = {}
    if request.predict and definition.workload.script is None:
        listener(Preparing(what="predicting the peak memory of the first trials"))
        forecaster = Forecaster.of_device(
            definition.device, executor=executor, workload=definition.workload
        )
        # A compiled one takes as long as all others together.
        eager = [config for _, config in list(first.values())[:wanted] if config.compile == "none"]
        forecasts = {
            forecast.config.fingerprint: forecast for forecast in forecaster.forecast_all(eager)
        }
    return Plan(
        definition=definition,
        legal=legal,
        configurations=legal.count() + len(legal.named_outside),
        trials_wanted=wanted,
        ends_by_time=most_trials >= MOST_TRIALS_IN_TIME,
        trials_at_once=trials_at_once,
        reused=reused.counts,
        first=tuple(first.values()),
        forecasts=forecasts,
        reused_baseline_bytes=next(
            (
                record.peak_memory_bytes or record.predicted_peak_memory_bytes
                for record in reused.records
                if record.config == baseline
            ),
            None,
        ),
        is_timed=time_trials,
        earlier_seconds=earlier_seconds,
        seconds_by_precision={
            precision: _full_seconds(definition, measurement)
            for precision, measurement in finished.items()
        },
        shared_seconds_by_precision={
            precision: _shared_seconds(definition, measurement)
            for precision, measurement in finished.items()
        },
        full_trainings=wanted if request.full_trainings else min(wanted, classes),
        compile_seconds=compile_seconds,
        share_by_precision={
            precision: count / len(configurations) for precision, count in precisions.items()
        },
        compiled_share=len(compiled) / len(configurations),
        confirm_share=request.confirm_share if request.confirm else 0.0,
        variants_share=VARIANTS_SHARE if request.confirm else 0.0,
        default_time_budget_seconds=default_budget,
        seconds_for_trials=request.seconds_for_trials,
    )


def _full_seconds(definition: StudyDefinition, measurement: Measurement) -> float:
    """Returns the seconds of a trial trained to the end, at the measured speed."""
    workload = definition.workload
    return _trial_seconds(
        workload, measurement, workload.steps * workload.global_batch, workload.evaluation_sequences
    )


def _shared_seconds(definition: StudyDefinition, measurement: Measurement) -> float:
    """Returns the seconds of a trial that measures memory and speed only."""
    workload = definition.workload
    steps = min(workload.steps, workload.warmup_steps + MEMORY_STEPS + SHORT_TIMED_STEPS)
    return _trial_seconds(workload, measurement, steps * workload.global_batch, 0)


def _trial_seconds(
    workload: Workload, measurement: Measurement, trained: int, evaluated: int
) -> float:
    """Returns the seconds of a trial from its number of trained and evaluated sequences.

    An evaluated sequence takes a third of a trained one, as it has no backward pass.
    """
    assert measurement.tokens_per_second is not None
    tokens = (trained + evaluated / 3) * workload.sequence_length
    return (measurement.startup_seconds or 0.0) + tokens / measurement.tokens_per_second
