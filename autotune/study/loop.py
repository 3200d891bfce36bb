"""Main loop: pick the next configuration, run it, store the result. Safe for several processes.

While it holds a slot of the device, a worker reads the results of the other workers, picks a
configuration, claims the trial, runs it and stores the result. No configuration runs twice: a
suggestion that has a trial already is skipped, and so is one that compiles to a program that has
run. A configuration predicted to be over the cap is not run at all.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from autotune.analysis.confirmed_speed import PRIOR_NOISE_ALONE, speed_noise
from autotune.analysis.loose_cap import loose_cap_sentence
from autotune.errors import Stopped, TrialLost
from autotune.execution.device_slots import DeviceSlots
from autotune.execution.local import LocalExecutor
from autotune.execution.trial_options import TrialOptions
from autotune.failpoints import failpoint
from autotune.spec.attempt import MAX_RETRIES
from autotune.spec.config import TrainingConfig
from autotune.spec.confirmation import RepeatedSpeed
from autotune.spec.result import Measurement, TrialRecord
from autotune.spec.search_space import LegalSpace
from autotune.spec.study import StudyDefinition
from autotune.study.events import (
    BudgetSpent,
    Confirming,
    Converged,
    Event,
    Listener,
    Notice,
    Predicting,
    SameProgram,
    SpaceExhausted,
    TrialBegan,
    TrialEnded,
    WaitingForDevice,
    WaitingForOthers,
)
from autotune.study.prediction_cache import PredictionCache
from autotune.study.sampler.ehvi_sampler import CONVERGED_IMPROVEMENT, Choice, EhviSampler
from autotune.study.sampler.optuna_samplers import OptunaStudy, derived_seed
from autotune.study.sampler.optuna_values import ObjectiveEncoder
from autotune.study.trial_runner import TrialRunner
from autotune.study.workers.coordinator import Coordinator

REPEATS_BEFORE_DRAWING = 6
"""After this many suggestions in a row that have a trial already, draw a new configuration."""

TRIALS_PER_REPEAT = 8
"""The baseline is measured again after so many trained trials."""

_SECONDS_BETWEEN_POLLS = 0.5
"""How often an idle worker reads what the other workers have done."""


class _LeaseLost(Exception):
    """The attempt's lease has expired, and another worker may run its trial now."""


class StudySession:
    """One worker's part of a study: what it knows of the results, and the loop that runs trials."""

    def __init__(
        self,
        definition: StudyDefinition,
        *,
        shared: Coordinator,
        executor: LocalExecutor,
        slots: DeviceSlots,
        prediction_cache: PredictionCache,
        study_folder: Path,
        listener: Listener,
        should_stop: Callable[[], bool],
        trial_options: TrialOptions,
        until_converged: bool = False,
        repeats_baseline: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._definition = definition
        self._legal: LegalSpace = definition.legal_space()
        self._shared = shared
        self._executor = executor
        self._slots = slots
        self._prediction_cache = prediction_cache
        self._listener = listener
        self._should_stop = should_stop
        self._until_converged = until_converged
        self._repeats_baseline = repeats_baseline
        self._speed_noise = PRIOR_NOISE_ALONE
        self._clock = clock
        self._optuna = OptunaStudy(
            legal=self._legal, sampler=definition.sampler, seed=definition.seed
        )
        self._objective_encoder = ObjectiveEncoder(
            cap_bytes=definition.cap_bytes, vocab_size=definition.workload.vocab_size
        )
        self._ranking = EhviSampler(self._legal, cap_bytes=definition.cap_bytes)
        self.seconds_in_sampler = 0.0
        """Time spent in the sampler so far."""
        self._first = definition.first_configurations()
        self._baseline = definition.baseline_config()
        self._trials_wanted = 0
        self._deadline: float | None = None
        self._ending: Event | None = None
        self._tell_sampler(shared.records.values(), notify=False)
        self.trial_runner = TrialRunner(
            definition,
            baseline=self._baseline,
            executor=executor,
            prediction_cache=prediction_cache,
            study_folder=study_folder,
            trial_options=trial_options,
            listener=listener,
            add_script_files=shared.add_script_files,
            check_stop=self._check_stop,
            clock=clock,
        )

    def run(self, *, trials_wanted: int, deadline: float | None) -> None:
        """Run until the study has `trials_wanted` configurations, or the clock passes `deadline`.

        Raises Stopped on a request to stop, TrialLost when the device no longer works, and
        StorageUnreachable when the database stays unreachable. However it ends, no measurement is
        lost.
        """
        self._trials_wanted = trials_wanted
        self._deadline = deadline
        while not self._is_over():
            revision = self._shared.revision
            with self._slot():
                self._refresh()
                self._repeat_baseline_if_due()
                is_done = not self._measure_next() and self._shared.revision == revision
            if is_done and not self._shared.running:
                break
            if is_done:
                self._wait_for_others()
        if self._is_over() and len(self._shared.records) < trials_wanted:
            self._ending = BudgetSpent(
                trials=len(self._shared.records), trials_wanted=trials_wanted
            )
        if self._ending is not None:
            self._listener(self._ending)

    # -- other workers -----------------------------------------------------------------------------

    @contextmanager
    def _slot(self) -> Iterator[None]:
        def report_wait(holder: str) -> None:
            self._listener(WaitingForDevice(device=self._definition.device.device, holder=holder))

        study = self._definition.name
        with self._executor.slot(self._slots, on_wait=report_wait, study=study):
            failpoint("device taken")
            yield

    def _refresh(self) -> None:
        self._tell_sampler(self._shared.refresh(), notify=True)

    def _tell_sampler(self, records: Iterable[TrialRecord], *, notify: bool) -> None:
        """Tell the sampler the finished trials, and the listener too with `notify`.

        They come in the order of their results, so that the samplers of all workers and of every
        later search are told the same.
        """
        for record in records:
            if record.is_finished:
                values = self._objective_encoder.to_optuna_values(record)
                with self._timed_as_sampler():
                    self._optuna.tell(record.config, values)
                if notify:
                    self._listener(TrialEnded(record=record))
                    self._say_if_cap_is_loose(record)

    def _say_if_cap_is_loose(self, record: TrialRecord) -> None:
        """Say it as soon as the baseline has ended: a smaller cap is another study."""
        if record.config != self._baseline:
            return
        if sentence := loose_cap_sentence(record, cap_bytes=self._definition.cap_bytes):
            self._listener(Notice(message=sentence))

    def _wait_for_others(self) -> None:
        self._listener(WaitingForOthers(numbers=tuple(sorted(self._shared.running))))
        end = self._clock() + _SECONDS_BETWEEN_POLLS
        while self._clock() < end and not self._is_over():
            time.sleep(_SECONDS_BETWEEN_POLLS / 5)

    # -- the next configuration --------------------------------------------------------------------

    def _measure_next(self) -> bool:
        """Run one trial; return False when none is left, or none for this worker at the moment.

        Poison trials, whose attempts ended their workers, run last.
        """
        self._ending = None
        return (
            self._measure_unfinished(poison=False)
            or self._measure_new()
            or self._measure_unfinished(poison=True)
        )

    def _measure_unfinished(self, *, poison: bool) -> bool:
        """Run a trial that has no result, is not running, and has attempts left."""
        excluded = self._shared.running | self._shared.failed_too_often
        for number, record in sorted(self._shared.unfinished.items()):
            is_poison = number in self._shared.poison_trials
            if number in excluded or is_poison != poison:
                continue
            if self._measure(record.config, name=record.name):
                return True
        return False

    def _measure_new(self) -> bool:
        for name, config in self._first:
            is_new = config.fingerprint not in self._shared.records
            if is_new and self._has_room() and self._measure(config, name=name):
                return True
        return self._has_room() and self._measure_next_suggestion()

    def _has_room(self) -> bool:
        return len(self._shared.records) < self._trials_wanted

    def _measure_next_suggestion(self) -> bool:
        """Run a configuration without a trial; return False when none is left, or none worth it."""
        if self._legal.values and self._definition.sampler == "ehvi":
            return self._measure_most_promising()
        if self._legal.values and self._definition.sampler != "grid":
            for repeat in range(REPEATS_BEFORE_DRAWING):
                self._check_stop()
                with self._timed_as_sampler():
                    config = self._optuna.ask(repeat=repeat)
                if not self._is_known(config) and self._measure(config):
                    return True
                if not self._has_room():
                    return False  # other workers have begun the last trials
        for config in self._optuna.unseen(set(self._shared.records)):
            self._check_stop()
            if not self._is_known(config) and self._measure(config):
                return True
            if not self._has_room():
                return False
        self._ending = SpaceExhausted(trials=len(self._shared.records))
        return False

    def _measure_most_promising(self) -> bool:
        """Run the configuration of the largest expected hypervolume improvement.

        Its memory is predicted first, after which another configuration may be the best.
        """
        while choice := self._choose():
            if self._until_converged and choice.relative_improvement < CONVERGED_IMPROVEMENT:
                self._ending = Converged(
                    trials=len(self._shared.records),
                    relative_improvement=choice.relative_improvement,
                )
                return False
            if choice.surely_fits:
                self._prediction_cache.mark_not_needed(choice.config)
            if self._prediction_cache.is_known(choice.config):
                return self._measure(choice.config)
            self._predict(choice.config)
            if self._is_over():
                return True
        self._ending = SpaceExhausted(trials=len(self._shared.records))
        return False

    def _choose(self) -> Choice | None:
        self._check_stop()
        records = list(self._shared.records.values())
        finished = [record for record in records if record.is_finished]
        not_to_train = self._prediction_cache.not_to_train(
            finished, limit_bytes=self._definition.cap_bytes
        )
        with self._timed_as_sampler():
            return self._ranking.choose(
                finished,
                self._prediction_cache.known.values(),
                excluded={*(record.config for record in records), *not_to_train},
                seed=derived_seed(self._definition.seed, told=len(finished)),
                predicts=self._prediction_cache.predicts,
            )

    @contextmanager
    def _timed_as_sampler(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds_in_sampler += time.perf_counter() - began

    def _is_known(self, config: TrainingConfig) -> bool:
        """Return whether there is a trial of it, or one of the same compiled program."""
        if config.fingerprint in self._shared.records:
            return True
        was_predicted = self._prediction_cache.is_known(config)
        self._predict(config)
        same = self._prediction_cache.same_program(config, self._shared.records.values())
        if same is not None and not was_predicted:
            self._listener(SameProgram(config=config, number=same.number))
        return same is not None

    def _predict(self, config: TrainingConfig) -> None:
        if self._prediction_cache.is_known(config):
            return
        self._listener(Predicting(config=config))
        for _ in range(MAX_RETRIES):
            try:
                self._prediction_cache.of(config)
                return
            except TrialLost:
                continue  # something outside killed the process of the prediction
        self._prediction_cache.of(config)

    def _is_over(self) -> bool:
        self._check_stop()
        return self._deadline is not None and self._clock() >= self._deadline

    def _check_stop(self) -> None:
        if self._should_stop():
            raise Stopped("the search was stopped", hint="run the same command again to continue")
        if self._shared.lease_has_expired:
            raise _LeaseLost

    def _check_device_after(self, measurement: Measurement) -> None:
        """Raise TrialLost if the device no longer works: a CUDA crash may be the device's fault."""
        if measurement.outcome == "crashed" and self._definition.device.type == "cuda":
            self._executor.check_device(self._definition.device.device)

    # -- how noisy the device is -------------------------------------------------------------------

    def _repeat_baseline_if_due(self) -> None:
        """Measure the speed of the baseline again, once for every TRIALS_PER_REPEAT trials.

        How much it differs from time to time is the noise of every speed that is measured once.
        """
        if not self._repeats_baseline:
            return
        records = list(self._shared.records.values())
        baseline = self._shared.records.get(self._baseline.fingerprint)
        was_timed = baseline is not None and baseline.tokens_per_second is not None
        if baseline is None or not was_timed or baseline.reused_from is not None:
            return
        confirmations = self._shared.confirmations()
        self._speed_noise = speed_noise(records, confirmations).alone
        done = sum(isinstance(one, RepeatedSpeed) for one in confirmations)
        trained = sum(record.was_trained for record in records)
        if done >= trained // TRIALS_PER_REPEAT:
            return
        self._listener(Confirming(doing="the baseline again, to see how noisy the device is"))
        began = self._clock()
        try:
            repeated = self.trial_runner.repeat_speed(
                self._baseline, log_name=f"trial-{baseline.number}-repeat-{done + 1}"
            )
        except TrialLost as error:
            self._executor.check_device(self._definition.device.device)
            repeated = RepeatedSpeed(
                config=self._baseline,
                tokens_per_second=None,
                failure=error.message,
                seconds=self._clock() - began,
            )
        self._shared.store_confirmation(repeated)
        self._speed_noise = speed_noise(records, self._shared.confirmations()).alone

    # -- run and store -----------------------------------------------------------------------------

    def _measure(self, config: TrainingConfig, *, name: str | None = None) -> bool:
        """Run one attempt at the configuration; return False if another worker has claimed it."""
        attempt = self._shared.claim(config, most_trials=self._trials_wanted, name=name)
        if attempt is None:
            self._refresh()
            return False
        self._listener(TrialBegan(number=attempt.number, config=config, name=attempt.name))
        with self._shared.working_on(attempt):
            try:
                self._predict(config)
                finished = self.trial_runner.measure(
                    config,
                    log_name=attempt.log_name,
                    records=self._shared.records.values(),
                    speed_noise=self._speed_noise,
                )
                self._check_device_after(finished.measurement)
            except TrialLost as error:
                self._shared.record_failure(attempt, cause=error.message)
                self._executor.check_device(self._definition.device.device)
                return True
            except _LeaseLost:
                return True
            except BaseException:
                self._shared.release_attempt(attempt)
                raise
            failpoint("trial measured")
            self._shared.store_result(attempt, finished)
        self._refresh()
        return True
