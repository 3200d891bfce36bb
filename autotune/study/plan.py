"""What a search would do, and how long it would take: from one short training a precision and one that compiles."""

import shutil
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.config import TrainingConfig
from autotune.definition import StudyDefinition
from autotune.executors.local import LocalExecutor
from autotune.result import Measurement
from autotune.search_space import LegalSpace
from autotune.study.events import Listener, Preparing
from autotune.study.request import DEFAULT_TRIALS, SearchRequest, new_definition, space_of, work_folder
from autotune.study.session import baseline_config, possible_trials
from autotune.workload import MEMORY_STEPS, MINIMUM_TIMED_STEPS

_WARMUP_STEPS = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `search` would do."""

    definition: StudyDefinition
    legal: LegalSpace
    configurations: int
    """Number of legal configurations, the named ones included."""
    trials_wanted: int
    first: tuple[tuple[str, TrainingConfig], ...]
    """The baseline and the named configurations, by name."""
    seconds_by_precision: Mapping[str, float]
    """Wall-clock seconds of an eager trial; without the precisions whose short training did not finish."""
    compile_seconds: float | None
    """What compiling adds to a trial; None when nothing in the space compiles, or it did not finish."""
    share_by_precision: Mapping[str, float]
    compiled_share: float
    """Share of the legal configurations that compile."""

    @property
    def seconds(self) -> float | None:
        """Of the whole search, were its trials drawn evenly from the space; None when nothing could be timed."""
        timed = sum(self.share_by_precision[precision] for precision in self.seconds_by_precision)
        if not timed:
            return None
        by_precision = self.seconds_by_precision.items()
        mean_seconds = sum(self.share_by_precision[precision] * seconds for precision, seconds in by_precision) / timed
        return self.trials_wanted * (mean_seconds + self.compiled_share * (self.compile_seconds or 0.0))


def plan(request: SearchRequest, *, listener: Listener = lambda event: None) -> Plan:
    """What a new study of this request would do; leaves no study behind. Raises InvalidInput of every kind."""
    space = space_of(request)
    work = work_folder(request.storage)
    with LocalExecutor(work) as executor:
        named = replace(request, name=f"plan-{time.time_ns()}")
        new = new_definition(named, space=space, executor=executor, work=work, listener=listener)
        folder = work / new.definition.name
        try:
            new.settle(folder)
            return _plan(new.definition, request, executor=executor, folder=folder, listener=listener)
        finally:
            new.discard()
            shutil.rmtree(folder, ignore_errors=True)


def _plan(
    definition: StudyDefinition,
    request: SearchRequest,
    *,
    executor: LocalExecutor,
    folder: Path,
    listener: Listener,
) -> Plan:
    legal = definition.legal_space()
    configurations = {c.fingerprint: c for c in [*legal.configurations(), *legal.named.values()]}
    baseline = baseline_config(definition.space, global_batch=definition.workload.global_batch)
    precisions = Counter(config.precision for config in configurations.values())
    compiled = [config for config in configurations.values() if config.compile != "none"]

    def short_training(config: TrainingConfig) -> Measurement:
        listener(Preparing(what=f"timing a few steps of {config.describe()}"))
        future = executor.submit(
            definition,
            config,
            study_folder=folder,
            log_name="plan",
            enforce_cap=False,
            time_limit_seconds=request.trial_time_limit_seconds,
            workload=replace(
                definition.workload,
                warmup_steps=_WARMUP_STEPS,
                steps=_WARMUP_STEPS + MEMORY_STEPS + MINIMUM_TIMED_STEPS,
                evaluation_sequences=1,
            ),
        )
        return future.result().measurement

    timed = {precision: short_training(replace(baseline, precision=precision)) for precision in precisions}
    first = {c.fingerprint: (name, c) for name, c in [("baseline", baseline), *legal.named.items()]}
    return Plan(
        definition=definition,
        legal=legal,
        configurations=len(configurations),
        trials_wanted=possible_trials(definition, request.trials or DEFAULT_TRIALS),
        first=tuple(first.values()),
        seconds_by_precision={
            precision: _trial_seconds(definition, measurement)
            for precision, measurement in timed.items()
            if measurement.tokens_per_second is not None
        },
        compile_seconds=short_training(compiled[0]).compile_seconds if compiled else None,
        share_by_precision={precision: count / len(configurations) for precision, count in precisions.items()},
        compiled_share=len(compiled) / len(configurations),
    )


def _trial_seconds(definition: StudyDefinition, measurement: Measurement) -> float:
    """Of a whole trial at the measured speed; a held-out sequence costs a third of a trained one."""
    workload = definition.workload
    assert measurement.tokens_per_second is not None
    sequences = workload.steps * workload.global_batch + workload.evaluation_sequences / 3
    training_seconds = sequences * workload.sequence_length / measurement.tokens_per_second
    return (measurement.startup_seconds or 0.0) + training_seconds
