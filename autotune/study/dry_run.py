"""What a search would do, and how long it would take: from one short training a precision and one that compiles."""

import shutil
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.errors import UnknownStudy
from autotune.execution.local import FinishedTrial, LocalExecutor
from autotune.spec.config import TrainingConfig
from autotune.spec.result import Measurement
from autotune.spec.search_space import LegalSpace
from autotune.spec.study import StudyDefinition
from autotune.spec.workload import MEMORY_STEPS, MINIMUM_TIMED_STEPS, SHORT_TIMED_STEPS, Workload
from autotune.storage.store import StudyStore
from autotune.study.events import Listener, Notice, Preparing
from autotune.study.request import SearchRequest, new_definition, space_of
from autotune.study.reuse import ReusedResults, reuse
from autotune.study.trial_runner import representative
from autotune.study.work_folder import work_folder

_WARMUP_STEPS = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `search` would do."""

    definition: StudyDefinition
    legal: LegalSpace
    configurations: int
    """Number of legal configurations, the named ones included."""
    trials_wanted: int
    """Without those that are taken over."""
    reused: Mapping[str, int]
    """How many results of each earlier study would be."""
    first: tuple[tuple[str, TrainingConfig], ...]
    """The baseline and the named configurations, by name, as far as they are not taken over."""
    seconds_by_precision: Mapping[str, float]
    """Wall-clock seconds of an eager trial to the end; without the precisions whose short training
    did not finish."""
    shared_seconds_by_precision: Mapping[str, float]
    """Of one that measures memory and speed only."""
    full_trainings: int
    """How many of the trials wanted are trained to the end: one of each numerics class."""
    compile_seconds: float | None
    """What compiling adds to a trial; None when nothing in the space compiles, or it did not
    finish."""
    share_by_precision: Mapping[str, float]
    compiled_share: float
    """Share of the legal configurations that compile."""

    @property
    def seconds(self) -> float | None:
        """Of the whole search, were its trials drawn evenly from the space; None when nothing could be timed."""
        full, shared = (
            self._mean(self.seconds_by_precision),
            self._mean(self.shared_seconds_by_precision),
        )
        if full is None or shared is None:
            return None
        compile_seconds = self.trials_wanted * self.compiled_share * (self.compile_seconds or 0.0)
        return (
            self.full_trainings * full
            + (self.trials_wanted - self.full_trainings) * shared
            + compile_seconds
        )

    def _mean(self, seconds_by_precision: Mapping[str, float]) -> float | None:
        """Over the precisions that were timed, by their shares of the space."""
        timed = sum(self.share_by_precision[precision] for precision in seconds_by_precision)
        if not timed:
            return None
        return (
            sum(
                self.share_by_precision[name] * seconds
                for name, seconds in seconds_by_precision.items()
            )
            / timed
        )


def plan(request: SearchRequest, *, listener: Listener = lambda event: None) -> Plan:
    """What a new study of this request would do; leaves no study behind.

    Raises InvalidInput of every kind.
    """
    space = space_of(request)
    with suppress(UnknownStudy):  # no database yet
        StudyStore(request.storage).close()
    with (
        work_folder(request.storage) as work,
        LocalExecutor(work, note=lambda sentence: listener(Notice(message=sentence))) as executor,
    ):
        named = replace(request, name=f"plan-{time.time_ns()}")
        new = new_definition(named, space=space, executor=executor, work=work, listener=listener)
        folder = work / new.definition.name
        try:
            new.settle(folder)
            taken = _would_be_taken_over(new.definition, request)
            return _plan(
                new.definition, request, taken, executor=executor, folder=folder, listener=listener
            )
        finally:
            new.discard()
            shutil.rmtree(folder, ignore_errors=True)


def _would_be_taken_over(definition: StudyDefinition, request: SearchRequest) -> ReusedResults:
    try:
        store = StudyStore(request.storage)
    except UnknownStudy:  # no database yet
        return ReusedResults()
    try:
        return reuse(store, definition, request)
    finally:
        store.close()


def _plan(
    definition: StudyDefinition,
    request: SearchRequest,
    taken: ReusedResults,
    *,
    executor: LocalExecutor,
    folder: Path,
    listener: Listener,
) -> Plan:
    legal = definition.legal_space()
    configurations = {c.fingerprint: c for c in [*legal.configurations(), *legal.named.values()]}
    baseline = definition.baseline_config()
    precisions = Counter(config.precision for config in configurations.values())
    compiled = [config for config in configurations.values() if config.compile != "none"]

    def short_training(config: TrainingConfig) -> Measurement:
        listener(Preparing(what=f"timing a few steps of {config.describe()}"))
        with executor.slot_on(definition.device):
            return submitted(config).result().measurement

    def submitted(config: TrainingConfig) -> "Future[FinishedTrial]":
        return executor.submit(
            definition,
            config,
            study_folder=folder,
            log_name="plan",
            enforce_cap=False,
            time_limit_seconds=request.trial_time_limit_seconds,
            compile_time_limit_seconds=request.compile_time_limit_seconds,
            step_time_limit_seconds=request.step_time_limit_seconds,
            workload=replace(
                definition.workload,
                warmup_steps=_WARMUP_STEPS,
                steps=_WARMUP_STEPS + MEMORY_STEPS + MINIMUM_TIMED_STEPS,
                evaluation_sequences=1,
            ),
        )

    timed = {
        precision: short_training(replace(baseline, precision=precision))
        for precision in precisions
    }
    finished = {
        precision: one for precision, one in timed.items() if one.tokens_per_second is not None
    }
    known = {record.config.fingerprint for record in taken.records}
    left = {
        c.fingerprint: c for c in [baseline, *configurations.values()] if c.fingerprint not in known
    }
    wanted = min(request.new_trials, len(left))
    steps = definition.workload.steps
    represented = {
        one.config.numerics_class
        for one in taken.records
        if representative(one.config, [one], steps=steps)
    }
    classes = len({config.numerics_class for config in left.values()} - represented)
    named = [("baseline", baseline), *legal.named.items()]
    first = {c.fingerprint: (name, c) for name, c in named if c.fingerprint not in known}
    return Plan(
        definition=definition,
        legal=legal,
        configurations=len(configurations),
        trials_wanted=wanted,
        reused=taken.counts,
        first=tuple(first.values()),
        seconds_by_precision={
            precision: _full_seconds(definition, one) for precision, one in finished.items()
        },
        shared_seconds_by_precision={
            precision: _shared_seconds(definition, one) for precision, one in finished.items()
        },
        full_trainings=wanted if request.full_trainings else min(wanted, classes),
        compile_seconds=short_training(compiled[0]).compile_seconds if compiled else None,
        share_by_precision={
            precision: count / len(configurations) for precision, count in precisions.items()
        },
        compiled_share=len(compiled) / len(configurations),
    )


def _full_seconds(definition: StudyDefinition, measurement: Measurement) -> float:
    """Of a whole trial at the measured speed; a held-out sequence costs a third of a trained one."""
    workload = definition.workload
    return _trial_seconds(
        workload, measurement, workload.steps * workload.global_batch, workload.evaluation_sequences
    )


def _shared_seconds(definition: StudyDefinition, measurement: Measurement) -> float:
    workload = definition.workload
    steps = min(workload.steps, workload.warmup_steps + MEMORY_STEPS + SHORT_TIMED_STEPS)
    return _trial_seconds(workload, measurement, steps * workload.global_batch, 0)


def _trial_seconds(
    workload: Workload, measurement: Measurement, trained: int, evaluated: int
) -> float:
    assert measurement.tokens_per_second is not None
    training_seconds = (
        (trained + evaluated / 3) * workload.sequence_length / measurement.tokens_per_second
    )
    return (measurement.startup_seconds or 0.0) + training_seconds
