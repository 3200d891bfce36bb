"""Runs one trial: prediction, comparison with a plain training, training under the memory cap.

Configurations of one numerics class compute the same numbers and share one perplexity. The first
trial of a class, its representative, is trained to the end (with `perplexity_seeds`, once for each
seed); the others are trained for memory and speed only. With `full_trainings` every trial is
trained to the end, and with every seed.

This applies to a training script, too. Its evaluation may read other text with another micro
batch; between configurations that compute the same numbers, that difference is noise. Whether
another micro batch is the same training depends on the script: see `ParityGate.updates_alike`. If
it is another one, it is trained to the end, and no technique is blamed for it.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from autotune.analysis.confirmed_speed import PRIOR_NOISE_ALONE
from autotune.errors import PreparationFailed, Stopped, TrialLost
from autotune.execution.flow import Ended, Flow
from autotune.execution.local import LocalExecutor
from autotune.execution.prepared_folder import PREPARED, prepared_folder
from autotune.execution.server.client import Doing
from autotune.execution.tasks import PrepareSeed, Trace, Train
from autotune.reporting.outcomes import OUTCOME_LABELS
from autotune.spec.attempt import FinishedTrial
from autotune.spec.config import QUANTIZED_WEIGHTS, TrainingConfig
from autotune.spec.confirmation import InitialPerplexity, RepeatedSpeed
from autotune.spec.early_stopping import PruningBound, speed_margin
from autotune.spec.parity import NoTrace, ParityTrace
from autotune.spec.provenance import MEASURED, FailedSeed
from autotune.spec.result import Measurement, TrialRecord, bits_per_byte_at
from autotune.spec.training_request import TIMED_STAGES, TrainingRequest
from autotune.spec.user_code import takes_size
from autotune.spec.workload import Workload
from autotune.study.events import Comparing, Notice, TrialPhase
from autotune.study.running.parity_gate import ParityGate
from autotune.study.running.running_study import RunningStudy

_DOING: Mapping[str, str] = {
    "start": "starting",
    "parity": "comparing its first steps",
    "compile": "compiling",
    "step": "training",
    "evaluation": "evaluating",
}
"""What a user is told of each phase that the process of a trial reports."""


class TrialRunner:
    """Runs the trials of one study on one device, as flows.

    `check_lease` is called while a training runs, and ends it by what it raises. The runners of a
    search share `noted`, so that only one of them notes that a script's evaluation is not used.
    """

    def __init__(
        self,
        study: RunningStudy,
        *,
        executor: LocalExecutor,
        check_lease: Callable[[], None],
        noted: set[str] | None = None,
    ) -> None:
        definition, workload = study.definition, study.definition.workload
        self._study = study
        self._baseline = definition.baseline_config()
        self._executor = executor
        self._check_lease = check_lease
        self._noted = set() if noted is None else noted
        self._any_micro_batch = workload.has_loss_of_tokens
        self.is_timed = False
        """Whether a training runs whose speed what else the host does could change."""
        self._gate = ParityGate(
            self._trace,
            folder=study.folder / "parity",
            on_trace=lambda config: study.listener(Comparing(config=config)),
            any_micro_batch=self._any_micro_batch,
            sums_in_fp32=workload.script is None,
            global_batch=workload.global_batch,
            has_layers=workload.script is None and takes_size(workload.model, "layers"),
            devices=workload.devices_per_trial,
            device_type=definition.device.type,
        )

    def measure(
        self,
        config: TrainingConfig,
        *,
        log_name: str,
        records: Iterable[TrialRecord],
        speed_noise: float = PRIOR_NOISE_ALONE,
        may_end_early: bool = True,
    ) -> Flow[FinishedTrial]:
        """Returns the result of one configuration, whose forecast is known if it is to have one.

        Of `records`, the trials so far, those of its numerics class are looked at.

        `speed_noise` is the relative standard deviation of a speed between runs, which decides how
        much faster another trial must be to end this one; none does without `may_end_early`.

        Raises Stopped, TrialLost when the machine, not the configuration, ended the trial, and
        StudyMismatch when its code has read other files than its study, or trains another model
        without any technique.
        """
        skipped = self._skip_if_predicted_over_cap(config)
        if skipped is not None:
            return skipped
        self._store_script_files({})  # other workers may have found some
        finished = yield from self._run_with_parity_check(
            config,
            log_name=log_name,
            records=records,
            speed_noise=speed_noise,
            may_end_early=may_end_early,
        )
        if finished.measurement.outcome == "parity_failed":
            yield from self._gate.check_unchanged(config)
        if finished.measurement.tokens_per_second is None:
            return finished
        measurement = yield from self._with_flops(config, finished.measurement)
        return replace(finished, measurement=measurement)

    def _with_flops(self, config: TrainingConfig, measurement: Measurement) -> Flow[Measurement]:
        """Returns the measurement with the FLOPs of its step, as far as they are known.

        They may take a prediction. If the search ends meanwhile, or the prediction's process is
        killed, the result of the training is stored without them.
        """
        try:
            model_flops, recomputed_flops = yield from self._study.prediction_cache.flops_of(config)
        except (Ended, Stopped, TrialLost):
            return measurement
        return replace(
            measurement,
            model_flops_per_token=model_flops,
            recomputed_flops_per_token=recomputed_flops,
        )

    def _skip_if_predicted_over_cap(self, config: TrainingConfig) -> FinishedTrial | None:
        """Returns the result of a configuration that is surely over the cap; None to train it.

        The baseline is trained even over the cap if the device can hold it.
        """
        began = self._study.clock()
        limit_bytes = self._study.definition.cap_bytes
        if config == self._baseline:
            limit_bytes = self._study.definition.device.total_memory_bytes
        measurement = self._study.prediction_cache.measurement_if_over(
            config, limit_bytes=limit_bytes
        )
        if measurement is None:
            return None
        return FinishedTrial(measurement=measurement, seconds=self._study.clock() - began)

    def _run_with_parity_check(
        self,
        config: TrainingConfig,
        *,
        log_name: str,
        records: Iterable[TrialRecord],
        speed_noise: float,
        may_end_early: bool,
    ) -> Flow[FinishedTrial]:
        began = self._study.clock()
        verdict = yield from self._gate.check(config)
        if verdict.ends_trial is not None:
            return FinishedTrial(
                measurement=verdict.ends_trial, seconds=self._study.clock() - began
            )
        shared_with = None
        if verdict.kind != "not compared" and not self._study.trial_options.full_trainings:
            shared_with = yield from self._representative(config, records)
        bounds: tuple[PruningBound, ...] | None = None
        if shared_with is not None:
            bounds = ()
        if shared_with is not None and may_end_early:
            rivals = yield from self._of_same_training(config, possible_rivals(config, records))
            bounds = pruning_bounds(rivals, speed_noise=speed_noise)
        finished = yield from self._train_under_cap(
            config, log_name=log_name, reference=verdict.reference, pruning_bounds=bounds
        )
        measurement = finished.measurement
        if verdict.kind in ("same", "same at two blocks", "not compared"):
            # With `compare` the trial has made the comparison itself.
            measurement = replace(measurement, parity=verdict.kind, parity_message=verdict.message)
        self._note_evaluation(measurement)
        if shared_with is not None:
            measurement = _with_perplexity_of(shared_with, measurement)
        elif (
            self._study.trial_options.full_trainings
            or (yield from self._representative(config, records)) is None
        ):
            measurement = yield from self._with_repeats(config, measurement, log_name=log_name)
        return FinishedTrial(measurement=measurement, seconds=self._study.clock() - began)

    def _representative(
        self, config: TrainingConfig, records: Iterable[TrialRecord]
    ) -> Flow[TrialRecord | None]:
        """Returns the trial whose perplexity is that of `config`, too, if there is one."""
        steps = self._study.definition.workload.steps
        for record in possible_representatives(config, records, steps=steps):
            if (yield from self._is_same_training(config, record.config)):
                return record
        return None

    def _of_same_training(
        self, config: TrainingConfig, records: Iterable[TrialRecord]
    ) -> Flow[list[TrialRecord]]:
        same = []
        for record in records:
            if (yield from self._is_same_training(config, record.config)):
                same.append(record)
        return same

    def _is_same_training(self, config: TrainingConfig, other: TrainingConfig) -> Flow[bool]:
        """Returns whether two configurations of a numerics class are one training."""
        if config.micro_batch_size == other.micro_batch_size:
            return True
        if self._any_micro_batch:
            return (yield from self._gate.any_micro_batch_serves(config))
        if self._study.definition.workload.script is None:
            return False
        return (yield from self._gate.updates_alike(config, other))

    def _note_evaluation(self, measurement: Measurement) -> None:
        """Tell the user, once, that the evaluation of a script is not after its last step."""
        source = measurement.perplexity_source
        if source is None or source.unused_evaluation is None or "evaluation" in self._noted:
            return
        self._noted.add("evaluation")
        steps = self._study.definition.workload.steps
        self._study.listener(
            Notice(
                message=f"from here on {measurement.terms.quality} is that of the {source}: "
                f"evaluate after the update of step {steps} and give the loss to "
                "autotune.report(..., evaluation_loss=...)"
            )
        )

    def _with_repeats(
        self, config: TrainingConfig, first: Measurement, *, log_name: str
    ) -> Flow[Measurement]:
        """Train with the remaining seeds; return `first` with the perplexities' mean and spread."""
        workload = self._study.definition.workload
        if self._study.trial_options.perplexity_seeds == 1 or first.perplexity is None:
            return first
        perplexities = [first.perplexity]
        failed_seeds = []
        for extra in range(1, self._study.trial_options.perplexity_seeds):
            seed = (workload.seed + extra) % 2**32
            repeat = yield from self.train_with_seed(
                config, seed, log_name=f"{log_name}-seed-{seed}"
            )
            if repeat.measurement.perplexity is None:
                reason = repeat.measurement.message or repeat.measurement.outcome
                failed_seeds.append(FailedSeed(seed=seed, reason=reason))
            else:
                perplexities.append(repeat.measurement.perplexity)
        mean = statistics.fmean(perplexities)
        source = replace(
            first.perplexity_source or MEASURED,
            seeds=len(perplexities),
            failed_seeds=tuple(failed_seeds),
        )
        return replace(
            first,
            perplexity=mean,
            bits_per_byte=bits_per_byte_at(mean, first),
            perplexity_spread=statistics.stdev(perplexities) if len(perplexities) > 1 else None,
            perplexity_source=source,
        )

    def train_with_seed(
        self, config: TrainingConfig, seed: int, *, log_name: str
    ) -> Flow[FinishedTrial]:
        """Train to the end with other initial weights and another order of the data.

        The cap is not enforced: only the perplexity counts. Raises as `measure` does.
        """
        seeded = replace(self._study.definition.workload, seed=seed)
        if seeded.script is None:  # a script draws its weights itself
            yield from self._prepare_seed(seeded)
        return (
            yield from self._train(config, log_name=log_name, enforce_cap=False, workload=seeded)
        )

    def _prepare_seed(self, workload: Workload) -> Flow[None]:
        """Prepare the study's text with the weights of another seed, unless they exist."""
        folder = (
            self._study.folder / prepared_folder(self._study.definition.workload, workload)
        ).absolute()
        if not folder.exists():
            prepared = folder.with_name(PREPARED)
            task = PrepareSeed(workload=workload, prepared=prepared, folder=folder)
            yield from self._executor.perform(task)

    def repeat_speed(self, config: TrainingConfig, *, log_name: str) -> Flow[RepeatedSpeed]:
        """Measure the speed of a configuration once more, alone as in a trial.

        The cap is not enforced: the baseline may be over it. Raises as `measure` does.
        """
        began = self._study.clock()
        repeat = yield from self._train(
            config, log_name=log_name, enforce_cap=False, pruning_bounds=()
        )
        measurement = repeat.measurement
        failure = ""
        if measurement.tokens_per_second is None:
            failure = measurement.message or measurement.outcome
        return RepeatedSpeed(
            config=config,
            tokens_per_second=measurement.tokens_per_second,
            failure=failure,
            seconds=self._study.clock() - began,
        )

    def evaluate_untrained(self) -> Flow[InitialPerplexity]:
        """Returns the perplexity of the pretrained weights before any training.

        It is measured in the precision of the baseline or, where the cap has no room for that, with
        smaller weights, and in micro batches of one sequence. Raises as `measure` does.
        """
        began = self._study.clock()
        for config in self._untrained_configs():
            finished = yield from self._train(
                config,
                log_name=f"before-training-{config.fingerprint}",
                enforce_cap=True,
                evaluates_only=True,
            )
            measurement = finished.measurement
            if not measurement.ran_out_of_memory:
                break
        failure = ""
        if measurement.perplexity is None:
            failure = OUTCOME_LABELS[measurement.outcome]
            if measurement.message and not measurement.ran_out_of_memory:
                failure += f": {measurement.message}"
        return InitialPerplexity(
            config=config,
            perplexity=measurement.perplexity,
            failure=failure,
            seconds=self._study.clock() - began,
        )

    def _untrained_configs(self) -> list[TrainingConfig]:
        """Returns how weights may be evaluated, the most precise first.

        Those that are quantized are so in the way of some trial of the study. A new adapter adds
        nothing to what they compute.
        """
        unavailable = self._study.definition.unavailable
        configs = [TrainingConfig(precision=self._baseline.precision, micro_batch_size=1)]
        if "bf16-true" in unavailable.get("precision", {}):
            return configs
        smaller = TrainingConfig(precision="bf16-true", micro_batch_size=1)
        configs.append(smaller)
        used = [config.base_weights for _, config in self._study.definition.first_configurations()]
        searched = self._study.definition.space.techniques.get("base_weights", ())
        for weights in QUANTIZED_WEIGHTS:
            if weights in unavailable.get("base_weights", {}):
                continue
            if weights in used or weights in searched:
                configs.append(replace(smaller, adapter="lora", base_weights=weights))
        return configs

    # -- training in a separate process ------------------------------------------------------------

    def _train_under_cap(
        self,
        config: TrainingConfig,
        *,
        log_name: str,
        reference: ParityTrace | None,
        pruning_bounds: Sequence[PruningBound] | None,
    ) -> Flow[FinishedTrial]:
        """Train once; the baseline, if it does not fit the cap, without it.

        `pruning_bounds` is None where perplexity is to be measured, not shared.
        """

        def train(*, enforce_cap: bool) -> Flow[FinishedTrial]:
            return self._train(
                config,
                log_name=log_name,
                enforce_cap=enforce_cap,
                reference=reference,
                pruning_bounds=pruning_bounds,
            )

        is_baseline = config == self._baseline
        if is_baseline and self._study.prediction_cache.measurement_if_over(
            config, limit_bytes=self._study.definition.cap_bytes
        ):
            return (yield from train(enforce_cap=False))
        finished = yield from train(enforce_cap=True)
        if is_baseline and finished.measurement.ran_out_of_memory:
            return (yield from train(enforce_cap=False))
        return finished

    def _train(
        self,
        config: TrainingConfig,
        *,
        log_name: str,
        enforce_cap: bool,
        workload: Workload | None = None,
        reference: ParityTrace | None = None,
        evaluates_only: bool = False,
        pruning_bounds: Sequence[PruningBound] | None = None,
    ) -> Flow[FinishedTrial]:
        shares_perplexity = pruning_bounds is not None
        snapshot_file = None
        if self._study.trial_options.memory_snapshot:
            snapshot_file = (self._study.folder / "snapshots" / f"{log_name}.pickle").absolute()
        training = replace(
            self._training(config, enforce_cap=enforce_cap, workload=workload),
            is_baseline=config == self._baseline and not shares_perplexity,
            reference=reference,
            shares_perplexity=shares_perplexity,
            evaluates_only=evaluates_only,
            pruning_bounds=pruning_bounds or (),
            snapshot_file=snapshot_file,
        )
        try:
            finished = yield from self._executor.perform(
                Train(training=training),
                log_name=log_name,
                limits=self._study.trial_options.time_limits(),
                each=self._phases(),
            )
        finally:
            self.is_timed = False
        self._store_script_files(finished.script_files)
        return finished

    def _store_script_files(self, found: Mapping[str, str]) -> None:
        """Add files to the study that its script reads late; raises StudyMismatch."""
        workload = self._study.definition.workload
        if workload.script_files is not None:
            later = self._study.shared.add_script_files(found)
            workload = replace(workload, script_files_after_apply=later)
            definition = replace(self._study.definition, workload=workload)
            self._study = replace(self._study, definition=definition)

    def _phases(self) -> Callable[[Doing], None]:
        """Returns what tells the user each new phase of a training, while it runs."""
        phase = TrialPhase(doing="starting")
        self._study.listener(phase)

        def tell(known: Doing) -> None:
            nonlocal phase
            self._check_lease()
            self.is_timed = known.phase in TIMED_STAGES
            doing = _DOING.get(known.phase, phase.doing)
            now = TrialPhase(doing=doing, steps=known.steps, used_bytes=known.used_bytes)
            if now != phase:
                phase = now
                self._study.listener(phase)

        return tell

    def _trace(
        self, config: TrainingConfig, *, dropout: bool, dequantized: bool, layers: int | None
    ) -> Flow[ParityTrace | NoTrace]:
        workload = self._study.definition.workload
        if layers is not None:
            workload = at_depth(workload, layers)
        training = replace(
            self._training(config, enforce_cap=False, workload=workload),
            dequantized=dequantized,
            planned_for=self._study.definition.workload if layers is not None else None,
        )
        task = Trace(training=training, dropout=dropout)
        log_name = f"trace-{config.fingerprint}"
        try:
            return (
                yield from self._executor.perform(
                    task, log_name=log_name, limits=self._study.trial_options.time_limits()
                )
            )
        except PreparationFailed as error:
            return NoTrace(outcome="crashed", message=error.message)

    def _training(
        self, config: TrainingConfig, *, enforce_cap: bool, workload: Workload | None
    ) -> TrainingRequest:
        return self._executor.training(
            self._study.definition,
            config,
            study_folder=self._study.folder,
            enforce_cap=enforce_cap,
            workload=workload,
        )


def at_depth(workload: Workload, layers: int) -> Workload:
    """Returns the workload with fewer layers, whose weights are those of the study's first ones."""
    return replace(workload, layers=layers, pretrained=False)


def possible_representatives(
    config: TrainingConfig, records: Iterable[TrialRecord], *, steps: int
) -> list[TrialRecord]:
    """Returns the trials of its numerics class that were trained for all `steps`, in order.

    Of these, the first one that is the same training shares its perplexity.
    """
    return [
        record
        for record in sorted(records, key=lambda record: record.number)
        if record.is_same_training
        and record.perplexity is not None
        and record.perplexity_source is not None
        and record.perplexity_source.is_after_all_steps(steps)
        and record.config.numerics_class == config.numerics_class
    ]


def possible_rivals(config: TrainingConfig, records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Returns the feasible trials of its numerics class, whose speed and memory are known.

    Trials reused from an earlier study are excluded: how fast the device was then is not known.
    """
    return [
        record
        for record in records
        if record.feasible
        and record.is_same_training
        and record.reused_from is None
        and record.config.numerics_class == config.numerics_class
        and record.peak_memory_bytes is not None
        and record.tokens_per_second is not None
    ]


def pruning_bounds(
    rivals: Iterable[TrialRecord], *, speed_noise: float = PRIOR_NOISE_ALONE
) -> tuple[PruningBound, ...]:
    """Returns what ends a trial early: a rival that is better in memory and speed.

    `speed_noise` is the relative standard deviation of a speed between runs.
    """
    margin = speed_margin(speed_noise)
    return tuple(
        PruningBound(
            number=rival.number,
            peak_memory_bytes=rival.peak_memory_bytes or 0,
            tokens_per_second=rival.tokens_per_second or 0.0,
            speed_margin=margin,
        )
        for rival in rivals
    )


def _with_perplexity_of(record: TrialRecord, measurement: Measurement) -> Measurement:
    if not measurement.is_within_cap:
        return measurement
    return measurement.with_perplexity_of(record)
