"""One configuration put to the test: foreseen, held against a plain training, trained under the cap.

Perplexity belongs to a numerics class: the first trial of a class is trained to the end, with
`seeds` more than once, and stands for the others, which are trained for memory and speed only.
`full_trainings` trains every one to the end.

That holds for a training script, too. Its own evaluation may read other text with another micro
batch; compared between configurations that compute the same numbers, that is noise. But whether
another micro batch is the same training, the script decides: `ParityGate.updates_alike`.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.errors import PreparationFailed
from autotune.execution.local import FinishedTrial, LocalExecutor
from autotune.execution.server_tasks import POLL_SECONDS
from autotune.spec.config import TrainingConfig
from autotune.spec.early_stopping import PruningBound
from autotune.spec.parity import ParityTrace
from autotune.spec.result import AFTER_STEP, NOT_AFTER_THE_LAST_STEP, Measurement, TrialRecord
from autotune.spec.study import StudyDefinition
from autotune.spec.user_code import is_function_reference
from autotune.spec.workload import Workload
from autotune.study.events import Comparing, Listener, Notice
from autotune.study.parity_gate import ParityGate, Verdict
from autotune.study.prediction_cache import PredictionCache

_SECONDS_TO_END_A_TRIAL = 5.0


@dataclass(frozen=True, kw_only=True)
class TrialOptions:
    """How trials are run; may differ from one run of a study to the next."""

    time_limit_seconds: float
    compile_time_limit_seconds: float | None = None
    step_time_limit_seconds: float | None = None
    """None: a share of the whole (`execution/server/limits.py`)."""
    full_trainings: bool = False
    seeds: int = 1
    """Trainings of a trial that stands for its numerics class, each from its own initial weights
    and data order."""
    keep_snapshots: bool = False


class TrialRunner:
    def __init__(
        self,
        definition: StudyDefinition,
        *,
        baseline: TrainingConfig,
        executor: LocalExecutor,
        prediction_cache: PredictionCache,
        study_folder: Path,
        trial_options: TrialOptions,
        listener: Listener,
        check_stop: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._definition = definition
        self._baseline = baseline
        self._executor = executor
        self._prediction_cache = prediction_cache
        self._folder = study_folder
        self._manner = trial_options
        self._check_stop = check_stop
        self._clock = clock
        workload = definition.workload
        self._listener = listener
        self._was_evaluation_noted = False
        # A model or a script of the user's may have a loss that is no sum over the sequences of the
        # global batch.
        self._any_micro_batch = workload.script is None and not is_function_reference(
            workload.model
        )
        self._gate = ParityGate(
            self._trace,
            folder=study_folder / "parity",
            on_trace=lambda config: listener(Comparing(config=config)),
            any_micro_batch=self._any_micro_batch,
        )

    def measure(
        self, config: TrainingConfig, *, log_name: str, records: Iterable[TrialRecord]
    ) -> FinishedTrial:
        """The result of one configuration.

        Raises Stopped, and TrialLost where the machine has cost it.
        """
        return self._skip_if_predicted_over_cap(config) or self._run_with_parity_check(
            config, log_name=log_name, records=records
        )

    def _skip_if_predicted_over_cap(self, config: TrainingConfig) -> FinishedTrial | None:
        """The result of a configuration whose prediction leaves no doubt; None where it must be trained.

        The baseline is trained beyond the cap, wherever the device can hold it.
        """
        began = self._clock()
        device_bytes = self._definition.device.total_memory_bytes
        limit_bytes = device_bytes if config == self._baseline else self._definition.cap_bytes
        refused = self._prediction_cache.refused(config, limit_bytes=limit_bytes)
        return (
            None
            if refused is None
            else FinishedTrial(measurement=refused, seconds=self._clock() - began)
        )

    def _run_with_parity_check(
        self, config: TrainingConfig, *, log_name: str, records: Iterable[TrialRecord]
    ) -> FinishedTrial:
        began = self._clock()
        verdict = self._gate.judge(config)
        if verdict.kind == "failed":
            failed = Measurement(
                outcome="parity_failed",
                message=f"computes another training: {verdict.message}",
                parity="failed",
                parity_message=verdict.message,
            )
            return FinishedTrial(measurement=failed, seconds=self._clock() - began)
        stands_for_it = None
        if verdict.kind != "not compared" and not self._manner.full_trainings:
            stands_for_it = self._representative(config, records)
        finished = self._train_under_cap(
            config,
            log_name=log_name,
            reference=verdict.reference,
            pruning_bounds=None
            if stands_for_it is None
            else pruning_bounds(config, records, is_same=self._is_same_training),
        )
        measurement = _with_verdict(finished.measurement, verdict)
        self._note_evaluation(measurement)
        if stands_for_it is not None:
            measurement = _with_perplexity_of(stands_for_it, measurement)
        elif self._representative(config, records) is None:
            measurement = self._repeated(config, measurement, log_name=log_name)
        return FinishedTrial(measurement=measurement, seconds=self._clock() - began)

    def _representative(
        self, config: TrainingConfig, records: Iterable[TrialRecord]
    ) -> TrialRecord | None:
        steps = self._definition.workload.steps
        return representative(config, records, steps=steps, is_same=self._is_same_training)

    def _is_same_training(self, config: TrainingConfig, other: TrainingConfig) -> bool:
        """Whether two configurations of one numerics class train alike, whatever their micro batches."""
        if self._any_micro_batch or config.micro_batch_size == other.micro_batch_size:
            return True
        return self._definition.workload.script is not None and self._gate.updates_alike(
            config, other
        )

    def _note_evaluation(self, measurement: Measurement) -> None:
        """Says once that the evaluation of a script decides nothing."""
        if (
            NOT_AFTER_THE_LAST_STEP in (measurement.perplexity_source or "")
            and not self._was_evaluation_noted
        ):
            self._was_evaluation_noted = True
            steps = self._definition.workload.steps
            self._listener(
                Notice(
                    message=f"from here on perplexity is that of the {measurement.perplexity_source}: evaluate after "
                    f"the update of step {steps} and give the loss to autotune.report(..., evaluation_loss=...)"
                )
            )

    def _repeated(
        self, config: TrainingConfig, first: Measurement, *, log_name: str
    ) -> Measurement:
        """With the mean and the spread of perplexity over the seeds wanted."""
        workload = self._definition.workload
        if self._manner.seeds == 1 or first.perplexity is None or workload.script is not None:
            return first
        perplexities, failures = [first.perplexity], []
        for seed in ((workload.seed + extra) % 2**32 for extra in range(1, self._manner.seeds)):
            seeded = replace(workload, seed=seed)
            self._executor.prepare_seed(self._definition, seeded, self._folder)
            repeat = self._train(
                config, log_name=f"{log_name}-seed-{seed}", enforce_cap=False, workload=seeded
            )
            if repeat.measurement.perplexity is None:
                failures.append(
                    f"seed {seed}: {repeat.measurement.message or repeat.measurement.outcome}"
                )
            else:
                perplexities.append(repeat.measurement.perplexity)
        mean = statistics.fmean(perplexities)
        failed = f", without {'; '.join(failures)}" if failures else ""
        return replace(
            first,
            perplexity=mean,
            bits_per_byte=bits_per_byte_at(mean, first),
            perplexity_spread=statistics.stdev(perplexities) if len(perplexities) > 1 else None,
            perplexity_source=f"measured, mean of {len(perplexities)} seeds{failed}",
        )

    # -- in a process of its own -------------------------------------------------------------------

    def _train_under_cap(
        self,
        config: TrainingConfig,
        *,
        log_name: str,
        reference: ParityTrace | None,
        pruning_bounds: Sequence[PruningBound] | None,
    ) -> FinishedTrial:
        """`pruning_bounds` where perplexity is shared; None where it is to be measured."""

        def train(*, enforce_cap: bool) -> FinishedTrial:
            return self._train(
                config,
                log_name=log_name,
                enforce_cap=enforce_cap,
                reference=reference,
                pruning_bounds=pruning_bounds,
            )

        is_baseline = config == self._baseline
        if is_baseline and self._prediction_cache.refused(
            config, limit_bytes=self._definition.cap_bytes
        ):
            return train(enforce_cap=False)
        finished = train(enforce_cap=True)
        if is_baseline and finished.measurement.outcome in ("over_cap", "out_of_memory"):
            return train(enforce_cap=False)
        return finished

    def _train(
        self,
        config: TrainingConfig,
        *,
        log_name: str,
        enforce_cap: bool,
        workload: Workload | None = None,
        reference: ParityTrace | None = None,
        pruning_bounds: Sequence[PruningBound] | None = None,
    ) -> FinishedTrial:
        future = self._executor.submit(
            self._definition,
            config,
            study_folder=self._folder,
            log_name=log_name,
            enforce_cap=enforce_cap,
            **self._time_limits,
            workload=workload,
            reference=reference,
            shares_perplexity=pruning_bounds is not None,
            pruning_bounds=pruning_bounds or (),
            keep_snapshot=self._manner.keep_snapshots,
        )
        return self._wait_for(future)

    @property
    def _time_limits(self) -> dict[str, Any]:
        return {
            "time_limit_seconds": self._manner.time_limit_seconds,
            "compile_time_limit_seconds": self._manner.compile_time_limit_seconds,
            "step_time_limit_seconds": self._manner.step_time_limit_seconds,
        }

    def _wait_for(self, future: "Future[FinishedTrial]") -> FinishedTrial:
        """The trial's result; whatever ends the wait early ends the trial, and it will be run again."""
        try:
            while True:
                try:
                    return future.result(timeout=POLL_SECONDS)
                except NotYet:
                    self._check_stop()
        except BaseException:
            self._executor.cancel(future)
            wait([future], timeout=_SECONDS_TO_END_A_TRIAL)
            raise

    def _trace(self, config: TrainingConfig, *, dropout: bool) -> ParityTrace | str:
        try:
            return self._executor.trace(
                self._definition,
                config,
                study_folder=self._folder,
                dropout=dropout,
                **self._time_limits,
            )
        except PreparationFailed as error:  # its process died or ran out of time
            return error.message


IsSameTraining = Callable[[TrainingConfig, TrainingConfig], bool]


def _always_same(config: TrainingConfig, other: TrainingConfig) -> bool:
    return True


def representative(
    config: TrainingConfig,
    records: Iterable[TrialRecord],
    *,
    steps: int,
    is_same: IsSameTraining = _always_same,
) -> TrialRecord | None:
    """The first trial of the same numerics class that was trained all `steps`, and is the same training.

    `is_same` says whether two configurations of a numerics class are one training.
    """
    alike = (
        record
        for record in records
        if record.parity == "same"
        and record.perplexity is not None
        and _is_of_its_whole_training(record.perplexity_source or "", steps=steps)
        and record.config.numerics_class == config.numerics_class
    )
    for record in sorted(alike, key=lambda record: record.number):
        if is_same(config, record.config):
            return record
    return None


def _is_of_its_whole_training(source: str, *, steps: int) -> bool:
    """Whether a perplexity says what the trial itself has learned in all its steps."""
    return source.startswith(("measured", "training loss")) or source == f"{AFTER_STEP} {steps}"


def pruning_bounds(
    config: TrainingConfig,
    records: Iterable[TrialRecord],
    *,
    is_same: IsSameTraining = _always_same,
) -> tuple[PruningBound, ...]:
    """The feasible trials that are the same training: one that is better in memory and speed ends this one.

    Not those of an earlier study: how fast the device was that day is not known.
    """
    return tuple(
        PruningBound(
            number=r.number,
            peak_memory_bytes=r.peak_memory_bytes,
            tokens_per_second=r.tokens_per_second,
        )
        for r in records
        if r.feasible
        and r.parity == "same"
        and r.reused_from is None
        and r.config.numerics_class == config.numerics_class
        and r.peak_memory_bytes is not None
        and r.tokens_per_second is not None
        and is_same(config, r.config)
    )


def bits_per_byte_at(perplexity: float, first: Measurement) -> float | None:
    """Bits a byte where `perplexity` stands in the place of the one that was measured first.

    Both are the same mean loss in other units, so that they grow as the logarithm of perplexity
    does. A perplexity of 1 is no loss at all, which no unit scales: its bits are returned as they
    are.
    """
    if first.bits_per_byte is None or first.perplexity is None or first.perplexity == 1.0:
        return first.bits_per_byte
    return first.bits_per_byte * math.log(perplexity) / math.log(first.perplexity)


def _with_verdict(measurement: Measurement, verdict: Verdict) -> Measurement:
    """A trial that compared itself with the reference has said so already."""
    if verdict.kind == "compare":
        return measurement
    return replace(measurement, parity=verdict.kind, parity_message=verdict.message)


def _with_perplexity_of(record: TrialRecord, measurement: Measurement) -> Measurement:
    if measurement.outcome not in ("ok", "dominated"):
        return measurement
    return replace(
        measurement,
        perplexity=record.perplexity,
        perplexity_spread=record.perplexity_spread,
        bits_per_byte=record.bits_per_byte,
        perplexity_source=f"shared with trial {record.number}",
    )
