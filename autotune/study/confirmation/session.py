"""Confirms the finalists of a search: does what `plan.py` says, within a share of the time.

Everything that it measures is stored beside the trials, so that a confirmation that was stopped
goes on where it was, and every process sees the same.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar, assert_never

from autotune.analysis.confirmed import confirmed_records, variant_records
from autotune.analysis.pick import Preferences
from autotune.errors import TrialLost
from autotune.execution.flow import Flow, result_of
from autotune.execution.in_turn import TrainingInTurn
from autotune.execution.local import LocalExecutor
from autotune.spec.config import FIELD_ORDER, TrainingConfig, reverted, rule_violations
from autotune.spec.confirmation import (
    Confirmation,
    PairedSpeed,
    RepeatedSpeed,
    SeedPerplexity,
    VariantMeasurement,
    paired_speeds,
)
from autotune.spec.device_group import joint_name
from autotune.spec.result import TrialRecord
from autotune.study.confirmation.plan import (
    PICK_CONFIRMATIONS,
    RepeatAlone,
    Step,
    TimeInTurn,
    TrainSeed,
    next_step,
    next_step_of,
    next_variants,
    pick_of,
)
from autotune.study.confirmation.request import (
    ConfirmationRequest,
    allowed_seconds,
    seconds_of_trials,
)
from autotune.study.events import (
    ConfirmationTime,
    Confirming,
    Notice,
    WaitingForDevice,
)
from autotune.study.running.running_study import RunningStudy
from autotune.study.running.trial_runner import TrialRunner
from autotune.system.failpoints import failpoint

T = TypeVar("T")

ROUNDS = 40
"""Blocks of each training of a run in turn, or as many as a script has steps for. Between runs
of 12 rounds the ratio of two speeds differed by 2.9 to 3.4 %, between runs of 24 by 1.1 to 1.7 %
(`studies/confirmation`); more take little longer beside starting and compiling."""
FURTHER_SEEDS = 2
"""Further seeds for a class in 16 bit that competes with fp32: three trainings in all."""


class ConfirmationSession:
    """Measures again what decides a study's front and pick."""

    def __init__(
        self,
        study: RunningStudy,
        *,
        executor: LocalExecutor,
        trials_on_device: int,
        trial_runner: TrialRunner,
        check_stop: Callable[[], None],
        preferences: Preferences,
    ) -> None:
        self._study = study
        self._executor = executor
        self._trials_on_device = trials_on_device
        self._trial_runner = trial_runner
        self._check_stop = check_stop
        self._preferences = preferences
        self._baseline = study.definition.baseline_config()

    def run(self, request: ConfirmationRequest, *, ends: float = math.inf) -> None:
        """Confirm the finalists, then measure the pick without each of its techniques.

        Nothing begins that would probably not end before `ends`. Raises Stopped, TrialLost and
        StorageUnreachable; what was measured until then is stored.
        """
        began = self._study.clock()
        for_finalists, for_variants = allowed_seconds(
            seconds_of_trials(self._study.shared.trial_times()),
            self._study.shared.confirmations(),
            share=request.share,
        )
        if request.trial is not None:
            for_variants = 0.0
        for_finalists = min(for_finalists, max(0.0, ends - began))
        for_variants = min(for_variants, max(0.0, ends - began - for_finalists))
        allowed = for_finalists + for_variants
        if request.seconds is not None:
            allowed = for_finalists = request.seconds
        self._study.listener(ConfirmationTime(seconds=allowed))
        self.confirm(
            seconds=for_finalists,
            trial=request.trial,
            at_least_once=request.at_least_once,
            ends=ends,
        )
        if request.seconds is not None:
            for_variants = max(0.0, request.seconds - (self._study.clock() - began))
        for_variants = min(for_variants, max(0.0, ends - self._study.clock()))
        if request.trial is None:
            self._study.listener(ConfirmationTime(seconds=for_variants))
            self.measure_variants(seconds=for_variants)

    # -- the finalists -----------------------------------------------------------------------------

    def confirm(
        self, *, seconds: float, trial: int | None, at_least_once: bool, ends: float = math.inf
    ) -> None:
        """Measure the finalists again, or only that `trial`, for about so many seconds.

        The first measurement of a study, or with `at_least_once` that of this call, has all the
        time until `ends`. None begins that would probably not end in its time, but one of fewer
        trials than planned may. Raises Stopped, TrialLost and StorageUnreachable; what was measured
        until then is stored.
        """
        deadline = self._study.clock() + seconds
        is_first = at_least_once or not self._was_measured_again()
        wanted = PICK_CONFIRMATIONS
        if trial is not None:
            confirmed = confirmed_records(self._records(), self._study.shared.confirmations())
            record = next(record for record in confirmed if record.number == trial)
            wanted = max(wanted, record.confirmations + 1)
        while step := self._next_step(trial, wanted=wanted):
            self._check_stop()
            until = ends if is_first else deadline
            if not (fitting := self._fitting(step, until)):
                self._note_time_is_up(f"not certain yet: {_described(step)}")
                return
            is_first = False
            with self._slot():
                self._do(fitting, until=until)

    def _was_measured_again(self) -> bool:
        return any(isinstance(one, PairedSpeed) for one in self._study.shared.confirmations())

    def _next_step(self, trial: int | None, *, wanted: int) -> Step | None:
        """Returns what to measure next; of a `trial`, until it has `wanted` confirmations."""
        self._study.shared.refresh()
        records = self._records()
        confirmations = self._study.shared.confirmations()
        if trial is not None:
            return next_step_of(
                trial,
                records,
                confirmations,
                baseline=self._baseline,
                preferences=self._preferences,
                until=wanted,
            )
        return next_step(
            records,
            confirmations,
            baseline=self._baseline,
            preferences=self._preferences,
            seeds=self._further_seeds(),
        )

    def _records(self) -> list[TrialRecord]:
        return sorted(self._study.shared.records.values(), key=lambda record: record.number)

    def _further_seeds(self) -> list[int]:
        """Returns the seeds of the repetitions; none where every class was trained with several."""
        workload = self._study.definition.workload
        if self._study.trial_options.perplexity_seeds > 1:
            return []
        return [(workload.seed + extra) % 2**32 for extra in range(1, FURTHER_SEEDS + 1)]

    def _fitting(self, step: Step, until: float) -> Step | None:
        """Returns as much of a step as probably ends by then; None where nothing does."""
        left = until - self._study.clock()
        if self._expected_seconds(step) <= left:
            return step
        if isinstance(step, TimeInTurn) and len(step.subjects) > 1:
            return self._fitting(replace(step, subjects=step.subjects[:-1]), until)
        return None

    def _do(self, step: Step, *, until: float) -> None:
        self._study.listener(Confirming(doing=_described(step)))
        measured: Sequence[Confirmation]
        match step:
            case TimeInTurn():
                measured = self._time_in_turn(step, until=until)
            case TrainSeed():
                measured = [self._train_seed(step)]
            case RepeatAlone():
                measured = [self._repeat_alone(step)]
            case _:
                assert_never(step)
        failpoint("confirmation measured")
        for one in measured:
            self._study.shared.store_confirmation(one)
            failpoint("confirmation stored")

    def _time_in_turn(self, step: TimeInTurn, *, until: float) -> list[PairedSpeed]:
        """Returns the speeds; where the machine ended the run, that it did.

        Raises TrialLost where the device no longer works.
        """
        began = self._study.clock()
        try:
            return self._timed_in_turn(step, until=until)
        except TrialLost as error:
            self._executor.check_device(self._study.definition.device.device)
            return [
                PairedSpeed(
                    config=subject.config,
                    partner=step.partner.config,
                    schedule="in turn",
                    rounds=0,
                    speed_ratio=None,
                    partner_tokens_per_second=None,
                    failure=error.message,
                    seconds=(self._study.clock() - began) / len(step.subjects),
                )
                for subject in step.subjects
            ]

    def _timed_in_turn(self, step: TimeInTurn, *, until: float) -> list[PairedSpeed]:
        began = self._study.clock()
        taken = len(self._study.shared.confirmations())
        trainings = [
            TrainingInTurn(
                config=record.config,
                enforce_cap=record.feasible,
                device_bytes=record.device_bytes,
            )
            for record in (step.partner, *step.subjects)
        ]
        timed = self._executor.time_in_turn(
            self._study.definition,
            trainings,
            study_folder=self._study.folder,
            log_name=f"confirmation-{taken}",
            trial_options=self._study.trial_options,
            rounds=ROUNDS,
            seconds=max(0.0, until - began),
            seed=(self._study.definition.seed + taken) % 2**32,
        )
        return paired_speeds(
            timed.results, schedule=timed.schedule, seconds=self._study.clock() - began
        )

    def _train_seed(self, step: TrainSeed) -> SeedPerplexity:
        began = self._study.clock()
        config = step.record.config
        log_name = f"trial-{step.record.number}-seed-{step.seed}"
        finished = self._result_of(
            self._trial_runner.train_with_seed(config, step.seed, log_name=log_name)
        )
        measurement = finished.measurement
        failure = ""
        if measurement.perplexity is None:
            failure = measurement.message or measurement.outcome
        return SeedPerplexity(
            config=config,
            seed=step.seed,
            perplexity=measurement.perplexity,
            failure=failure,
            seconds=self._study.clock() - began,
        )

    def _repeat_alone(self, step: RepeatAlone) -> RepeatedSpeed:
        taken = len(self._study.shared.confirmations())
        log_name = f"trial-{step.record.number}-repeat-{taken + 1}"
        return self._result_of(
            self._trial_runner.repeat_speed(step.record.config, log_name=log_name)
        )

    def _result_of(self, flow: Flow[T]) -> T:
        return result_of(flow, each=self._check_stop)

    def _expected_seconds(self, step: Step) -> float:
        """Returns about how long a step takes: as long as the last one of its kind, or its trials.

        Compiled code comes from the study's cache. A trial that another study measured counts as
        one of this study.
        """
        of_a_trial = self._usual_seconds()
        confirmations = self._study.shared.confirmations()
        if isinstance(step, TrainSeed):
            trained = [one for one in confirmations if isinstance(one, SeedPerplexity)]
            return trained[-1].seconds if trained else step.record.seconds or of_a_trial
        if isinstance(step, RepeatAlone):
            repeated = [one for one in confirmations if isinstance(one, RepeatedSpeed)]
            return repeated[-1].seconds if repeated else step.record.seconds or of_a_trial
        paired = [one for one in confirmations if isinstance(one, PairedSpeed)]
        if paired:
            return paired[-1].seconds * len(step.subjects)
        total = 0.0
        for record in (step.partner, *step.subjects):
            own = (record.seconds or 0.0) - (record.compile_seconds or 0.0)
            total += own if record.seconds else of_a_trial
        return total

    # -- the pick without each of its techniques ---------------------------------------------------

    def measure_variants(self, *, seconds: float) -> None:
        """Measure the pick without each of its techniques, for about so many seconds.

        What was left out for lack of time is named in a notice. Raises as `confirm` does.
        """
        deadline = self._study.clock() + seconds
        left_out = []
        are_compared = True
        for technique, config in self._variants_to_train():
            self._check_stop()
            if self._study.clock() + self._usual_seconds() > deadline:
                left_out.append(technique)
                continue
            self._study.listener(Confirming(doing=f"the pick without {technique}"))
            try:
                with self._slot():
                    self._train_variant(config)
            except TrialLost as error:
                self._executor.check_device(self._study.definition.device.device)
                self._study.listener(
                    Notice(message=f"the pick without {technique}: {error.message}")
                )
        while step := self._next_variants_in_turn():
            self._check_stop()
            if not (fitting := self._fitting(step, deadline)):
                are_compared = False
                break
            with self._slot():
                self._do(fitting, until=deadline)
        if left_out or not are_compared:
            self._note_time_is_up(what_was_left_out(left_out, are_compared=are_compared))

    def _variants(self) -> dict[str, TrainingConfig]:
        """Returns the pick without each of its techniques, by technique, where that is legal."""
        pick = pick_of(
            self._records(),
            self._study.shared.confirmations(),
            baseline=self._baseline,
            preferences=self._preferences,
        )
        if pick is None:
            return {}
        at = self._study.definition.legal_space().at
        variants = {}
        for technique in FIELD_ORDER:
            if getattr(pick.config, technique) == getattr(self._baseline, technique):
                continue
            variant = reverted(pick.config, technique, plain=self._baseline)
            if not rule_violations(variant.to_dict(), at):
                variants[technique] = variant
        return variants

    def _variants_to_train(self) -> list[tuple[str, TrainingConfig]]:
        known = {record.config for record in self._records() if record.is_finished}
        known |= {
            one.config
            for one in self._study.shared.confirmations()
            if isinstance(one, VariantMeasurement)
        }
        return [
            (technique, config)
            for technique, config in self._variants().items()
            if config not in known
        ]

    def _train_variant(self, config: TrainingConfig) -> None:
        began = self._study.clock()
        cache = self._study.prediction_cache
        if not cache.is_known(config):
            cache.add(self._result_of(cache.predict(config)))
        finished = self._result_of(
            self._trial_runner.measure(
                config,
                log_name=f"variant-{config.fingerprint}",
                records=self._records(),
                may_end_early=False,  # without a technique of the pick it is often dominated
            )
        )
        self._study.shared.store_confirmation(
            VariantMeasurement(
                config=config,
                measurement=finished.measurement,
                seconds=self._study.clock() - began,
            )
        )

    def _next_variants_in_turn(self) -> TimeInTurn | None:
        """Returns a run of variants whose speed was measured only once; None if there is none."""
        confirmations = self._study.shared.confirmations()
        records = [*self._records(), *variant_records(confirmations)]
        return next_variants(
            records,
            confirmations,
            variants=set(self._variants().values()),
            baseline=self._baseline,
            preferences=self._preferences,
        )

    def _usual_seconds(self) -> float:
        """Returns about how long a trial takes here, by the median of those that were trained."""
        seconds = [
            record.seconds for record in self._records() if record.was_trained and record.seconds
        ]
        return statistics.median(seconds) if seconds else 0.0

    # -- the device --------------------------------------------------------------------------------

    @contextmanager
    def _slot(self) -> Iterator[None]:
        def report_wait(holder: str) -> None:
            devices = (self._study.definition.device, *self._executor.other_devices)
            self._study.listener(WaitingForDevice(device=joint_name(devices), holder=holder))

        # A trial beside it would disturb one training more than the other.
        device, places = self._study.definition.device, self._trials_on_device
        with self._executor.slot(device, places=places, on_wait=report_wait, alone=True):
            yield

    def _note_time_is_up(self, what: str) -> None:
        self._study.listener(
            Notice(
                message=f"the time for confirmation is used up; {what}; "
                f"autotune confirm {self._study.definition.name} --time-budget none goes on"
            )
        )


def what_was_left_out(techniques: list[str], *, are_compared: bool) -> str:
    """Returns which variants of the pick were not measured.

    `techniques` are those without which it was not trained; `are_compared` is whether the others
    were measured in turn with it.
    """
    parts = []
    if techniques:
        parts.append(f"not measured: the pick without {', '.join(techniques)}")
    if not are_compared:
        which = "its other techniques" if techniques else "some of its techniques"
        parts.append(f"not measured in turn with it: the pick without {which}")
    return "; ".join(parts)


def _described(step: Step) -> str:
    if isinstance(step, TrainSeed):
        return f"#{step.record.number} with seed {step.seed}, as {step.reason}"
    if isinstance(step, RepeatAlone):
        return f"#{step.record.number} again: {step.reason}"
    subjects = ", ".join(_name(record) for record in step.subjects)
    return f"{subjects} in turn with {_name(step.partner)}: {step.reason}"


def _name(record: TrialRecord) -> str:
    return f"#{record.number}" if record.number >= 0 else record.config.describe()
