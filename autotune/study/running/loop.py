"""Main loop: pick the next configuration, run it, store the result. Safe for several processes.

Each place (`places.py`) of the search has a flow that reads from top to bottom, `_trials_at`: take
the device slot, ask what is next, do it, store the result. Places that ask at once are answered in
one round, with what was known at its beginning. No configuration runs twice: a suggestion that has
a trial already is skipped, and so is one that compiles to a program that has run. A configuration
predicted to be over the cap is not run at all. What runs elsewhere at that moment takes part in
each choice.

Not here: how a configuration is chosen (`sampler/`), how a trial is run and judged
(`trial_runner.py`), and who may store which result (`storage/attempts.py`).
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import islice

from autotune.analysis.confirmed_speed import PRIOR_NOISE_ALONE, speed_noise
from autotune.analysis.counting_perplexity import with_neutral_perplexities
from autotune.analysis.expected_step import ExpectedStep
from autotune.analysis.loose_cap import loose_cap_sentence
from autotune.errors import Stopped, StorageUnavailable, StorageUnreachable, TrialLost
from autotune.execution.flow import POLL_SECONDS, Flow, Flows, Pause
from autotune.execution.local import LocalExecutor
from autotune.spec.attempt import MAX_RETRIES, Attempt, FinishedTrial
from autotune.spec.config import TrainingConfig
from autotune.spec.confirmation import InitialPerplexity, RepeatedSpeed, initial_perplexity_of
from autotune.spec.prediction import Forecast
from autotune.spec.result import TrialRecord
from autotune.spec.search_space import LegalSpace
from autotune.spec.setting import NO_LIMIT
from autotune.study.events import (
    EVENTS_OF_A_PLACE,
    BudgetSpent,
    Confirming,
    Converged,
    Event,
    Notice,
    Predicting,
    SameProgram,
    SpaceExhausted,
    TrialBegan,
    TrialEnded,
    WaitingForOthers,
)
from autotune.study.prediction.prediction_cache import Predictor
from autotune.study.prediction.predictions_beside import PredictionsBeside
from autotune.study.running.named_order import Named, NamedOrder, is_unlikely
from autotune.study.running.places import Places, PlaceUnusable, ThreadedListener, TrialPlace
from autotune.study.running.running_study import RunningStudy
from autotune.study.running.trial_runner import TrialRunner
from autotune.study.sampler.ehvi_sampler import CONVERGED_IMPROVEMENT, Choice, EhviSampler
from autotune.study.sampler.memory_model import MemoryModel
from autotune.study.sampler.optuna_samplers import OptunaStudy, derived_seed
from autotune.study.sampler.optuna_values import ObjectiveEncoder
from autotune.study.workers.heartbeat import HeldLease
from autotune.system.failpoints import failpoint

REPEATS_BEFORE_DRAWING = 6
"""After this many suggestions in a row that have a trial already, draw a new configuration."""

TRIALS_PER_REPEAT = 8
"""The baseline is measured again after so many trained trials."""

SECONDS_OF_A_ROUND = 1.0
"""Suggestions take in every result that is older than this, unless choosing alone takes as long."""

_MOST_LIKELY = 8
"""So many suggestions of a round may be predicted beside its trials."""

_SECONDS_BETWEEN_POLLS = 0.5
"""After how long a place asks again that had nothing to do, unless a trial ends before."""


class _LeaseLost(Exception):
    """The attempt's lease has expired, and another worker may run its trial now."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A step of a place: an attempt that was claimed for it."""

    attempt: Attempt
    config: TrainingConfig


@dataclass(frozen=True, kw_only=True)
class Predict:
    """A step of a place: to predict a configuration that may come next."""

    config: TrainingConfig


class Aside(Enum):
    """A step of a place: a measurement that is no trial."""

    INITIAL_PERPLEXITY = auto()
    REPEAT_BASELINE = auto()


class Idle(Enum):
    """What a place is told for which there is no step: to ask again a little later, or to end."""

    WAIT = auto()
    END = auto()


Step = Trial | Predict | Aside


class StudySession:
    """One process's part of a study: what it knows of the results, and the loop that runs trials.

    It runs one trial at a time with `executor` while it has a slot on the device, or one at a time
    on each of `places`.
    """

    def __init__(
        self,
        study: RunningStudy,
        *,
        executor: LocalExecutor,
        should_stop: Callable[[], bool],
        until_converged: bool = False,
        repeats_baseline: bool = False,
        places: Places | None = None,
    ) -> None:
        definition = study.definition
        self._study = study
        self._legal: LegalSpace = definition.legal_space()
        self._should_stop = should_stop
        self._until_converged = until_converged
        self._repeats_baseline = repeats_baseline
        self._wants_initial_perplexity = definition.workload.pretrained
        """Whether the perplexity before training was not looked for yet."""
        self._speed_noise = PRIOR_NOISE_ALONE
        self._optuna = OptunaStudy(
            legal=self._legal, sampler=definition.sampler, seed=definition.seed
        )
        self._objective_encoder = ObjectiveEncoder(
            cap_bytes=definition.cap_bytes, vocab_size=definition.workload.vocab_size
        )
        self._finished_of_class: dict[tuple[str, ...], list[TrialRecord]] = defaultdict(list)
        """Trials with a result by numerics class: a trial is compared with those of its own."""
        self._ranking = EhviSampler(self._legal, cap_bytes=definition.cap_bytes)
        self.seconds_in_sampler = 0.0
        """Time spent in the sampler so far."""
        self._named = NamedOrder(definition)
        self._baseline = definition.baseline_config()
        self._expected: ExpectedStep | None = None
        self._trials_wanted = 0
        self._deadline: float | None = None
        self._last_event: Event | None = None
        """What ends the trials, once nothing is left to begin."""
        self._tell_sampler(study.shared.records.values(), notify=False)
        if places is None:
            place = TrialPlace(executor=executor, device=definition.device, clock=study.clock)
            places = Places([place], listener=ThreadedListener(study.listener))
        self._places = places
        self._flows = Flows(places.wait_for_one)
        self._runners: dict[TrialPlace, TrialRunner] = {}
        self._noted: set[str] = set()
        self._asking: list[tuple[TrialPlace, Future[Step | Idle]]] = []
        """Places that have their slot and wait to be told what is next."""
        self._at_work: dict[TrialPlace, Step] = {}
        """What places do at the moment."""
        self._leases: dict[TrialPlace, HeldLease] = {}
        """Those of the trials in flight."""
        self._is_nothing_left = False
        """Whether nothing is left to begin, and nothing runs here or elsewhere."""
        self._news: Future[None] = Future()
        """Is done once the next step of a place has ended, which may leave something to do."""
        self._suggestions: Iterator[Choice] | None = None
        """What to begin next, by what was known at the beginning of this round."""
        self._beside = PredictionsBeside(study.prediction_cache)
        self._likely: Iterator[TrainingConfig] | None = None
        """What this round's trials may be followed by, and is worth a prediction."""
        self._predicted_here: set[TrainingConfig] = set()
        self._has_stored = False
        """Whether results were stored that this process has not read yet."""
        self._error: BaseException | None = None
        """What the run ends by; then a result that cannot be stored waits on disk."""

    @property
    def trial_runner(self) -> TrialRunner:
        """Runs trials on the first place, for what is measured after the trials."""
        return self._runner(self._places.first)

    def _runner(self, place: TrialPlace) -> TrialRunner:
        if place not in self._runners:
            self._runners[place] = TrialRunner(
                replace(
                    self._study,
                    definition=replace(self._study.definition, device=place.device),
                    listener=lambda event: self._study.listener(_of_place(event, place)),
                    clock=place.clock,
                ),
                executor=place.executor,
                check_lease=lambda: self._check_lease(place),
                noted=self._noted,
            )
        return self._runners[place]

    def run(self, *, trials_wanted: int, deadline: float | None) -> None:
        """Run until the study has `trials_wanted` configurations, or the clock passes `deadline`.

        Raises Stopped on a request to stop, TrialLost when no device works any longer, and
        StorageUnreachable when the database stays unreachable. However it ends, no measurement is
        lost: `Flows.end` lets every place store what its training has found.
        """
        self._trials_wanted = trials_wanted
        self._deadline = deadline
        self._is_nothing_left = False
        self._error = None
        try:
            self._run_places()
        except BaseException as error:
            self._error = error
            self._flows.end()
            raise
        finally:
            self._asking = []
        if self._is_time_up() and len(self._study.shared.records) < trials_wanted:
            self._last_event = BudgetSpent(
                trials=len(self._study.shared.records), trials_wanted=trials_wanted
            )
        if self._last_event is not None:
            self._study.listener(self._last_event)
        self._say_what_was_not_tried()

    def _run_places(self) -> None:
        for place in list(self._places.usable):
            self._begin_at(place)
        while self._flows or not self._is_done():
            self._places.deliver()
            for place in self._places.newly_joined():
                self._begin_at(place)
            if self._is_done() and not self._at_work:
                self._flows.end()  # places that still wait for their devices, and what is beside
                return
            if self._asking or self._has_stored:
                self._refresh()
            self._answer()
            self._flows.wait(0.0 if self._asking else POLL_SECONDS)

    def _begin_at(self, place: TrialPlace) -> None:
        self._flows.begin(self._work_at(place))
        if self._study.prediction_cache.predicts:
            for _ in range(place.predictions_beside):
                self._flows.begin(self._predict_beside(place))

    def _is_done(self) -> bool:
        """Whether no place is to begin anything more; raises Stopped."""
        return self._is_time_up() or self._is_nothing_left

    def _say_what_was_not_tried(self) -> None:
        """Name the configurations of the space's file that had no turn, with the reason."""
        left = [one for one in self._named_left() if one[1] != self._baseline]
        memory = self._memory_model()
        unlikely = [name for name, config in left if is_unlikely(config, memory)]
        names = [name for name, _ in left if name not in unlikely]
        if unlikely:
            message = f"not tried, as they probably need more than the cap: {', '.join(unlikely)}"
            self._study.listener(Notice(message=message))
        if names and isinstance(self._last_event, BudgetSpent):
            self._study.listener(Notice(message=f"not tried for lack of time: {', '.join(names)}"))

    # -- the work at a place -----------------------------------------------------------------------

    def _work_at(self, place: TrialPlace) -> Flow[None]:
        try:
            yield from self._trials_at(place)
        except PlaceUnusable as error:
            self._places.lose(place, error.reason)
        except TrialLost as error:
            self._places.lose(place, error)

    def _trials_at(self, place: TrialPlace) -> Flow[None]:
        """Run trials at a place until none is left. Raises TrialLost where its device is lost."""
        step: Step | Idle | None = None
        while step is not Idle.END:
            with (yield from self._places.slot(place)):
                step = yield self._ask(place)
                while isinstance(step, Predict | Aside):  # after which another trial may be next
                    with self._doing(place, step):
                        yield from self._do_before_trial(place, step)
                    step = yield self._ask(place)
                if isinstance(step, Trial):
                    with self._doing(place, step):
                        yield from self._run_trial(place, step)
            if step is Idle.WAIT:
                yield Pause(_SECONDS_BETWEEN_POLLS, unless=self._news, clock=self._study.clock)

    def _do_before_trial(self, place: TrialPlace, step: Predict | Aside) -> Flow[None]:
        match step:
            case Predict():
                yield from self._predict(place, step.config)
                self._predicted_here.add(step.config)
            case Aside.INITIAL_PERPLEXITY:
                yield from self._measure_initial_perplexity(place)
            case Aside.REPEAT_BASELINE:
                yield from self._repeat_baseline(place)

    @contextmanager
    def _doing(self, place: TrialPlace, step: Step) -> Iterator[None]:
        self._at_work[place] = step
        try:
            yield
        finally:
            del self._at_work[place]
            self._news.set_result(None)
            self._news = Future()

    def _run_trial(self, place: TrialPlace, trial: Trial) -> Flow[None]:
        """Run an attempt and store its result, or what else became of it."""
        attempt = trial.attempt
        began = TrialBegan(
            number=attempt.number, config=trial.config, name=attempt.name, device=place.name
        )
        with self._study.shared.working_on(attempt) as lease:
            self._leases[place] = lease
            try:
                self._study.listener(began)
                finished = yield from self._measure(place, trial)
            except TrialLost as error:
                self._study.shared.record_failure(attempt, cause=error.message)
                yield from place.executor.checking_device(place.device.device)
                return
            except _LeaseLost:
                return
            except BaseException:
                self._study.shared.release_attempt(attempt)
                raise
            finally:
                del self._leases[place]
            failpoint("trial measured")
            self._store(attempt, finished)

    def _measure(self, place: TrialPlace, trial: Trial) -> Flow[FinishedTrial]:
        config = trial.config
        if not self._study.prediction_cache.is_known(config):
            yield from self._predict(place, config)
        finished = yield from self._runner(place).measure(
            config,
            log_name=trial.attempt.log_name,
            records=tuple(self._finished_of_class[config.numerics_class]),
            speed_noise=self._speed_noise,
        )
        if finished.measurement.outcome == "crashed" and place.device.type == "cuda":
            # A CUDA crash may be the device's fault. Raises TrialLost if it no longer works.
            yield from place.executor.checking_device(place.device.device)
        return finished

    def _store(self, attempt: Attempt, finished: FinishedTrial) -> None:
        """Store a result; where the search ends and the database is away, it waits on disk."""
        if self._error is None:
            self._study.shared.store_result(attempt, finished)
            self._has_stored = True
        elif isinstance(self._error, StorageUnreachable):
            self._study.shared.keep_result(attempt, finished)
        else:
            with suppress(StorageUnavailable, Stopped):
                self._study.shared.store_result(attempt, finished)

    def _check_lease(self, place: TrialPlace) -> None:
        lease = self._leases.get(place)
        if lease is not None and lease.is_lost:
            raise _LeaseLost

    # -- rounds ------------------------------------------------------------------------------------

    def _ask(self, place: TrialPlace) -> Future[Step | Idle]:
        """Returns the step that a place is to do next, which is decided in the next round."""
        asked: Future[Step | Idle] = Future()
        self._asking.append((place, asked))
        return asked

    def _answer(self) -> None:
        """Tell the places that ask what they are to do next.

        A round ends after SECONDS_OF_A_ROUND, so that what comes in meanwhile is looked at, or
        after twice the time that its first place took, so that no more than half of the time goes
        into fitting models; the places that are left are asked for in the next one. Where one has
        nothing to do, the others have nothing either.
        """
        waiting, self._asking = self._asking, []  # a place that is told its step may ask again
        if not waiting:
            return
        self._suggestions = self._likely = None
        revision = self._study.shared.revision
        began_at = self._study.clock()
        seconds = SECONDS_OF_A_ROUND
        is_first = True
        while waiting:
            place, asked = waiting[0]
            step = None if self._is_time_up() else self._next(place)
            if step is None:
                if self._study.shared.revision == revision:
                    self._answer_nothing(waiting)
                    return
                break  # others have changed what there is to do
            waiting.pop(0)
            self._flows.settle(asked, step)
            taken = self._study.clock() - began_at
            if is_first:
                seconds = max(seconds, 2 * taken)
                is_first = False
            if taken >= seconds:
                break
        self._asking = [*waiting, *self._asking]

    def _answer_nothing(self, waiting: Iterable[tuple[TrialPlace, Future[Step | Idle]]]) -> None:
        """Have places leave their slots, for now or for good."""
        running = tuple(sorted(self._study.shared.running))
        self._is_nothing_left = self._is_time_up() or not (self._at_work or running)
        if not (self._is_nothing_left or self._at_work):
            self._study.listener(WaitingForOthers(numbers=running))
        for _, asked in waiting:
            self._flows.settle(asked, Idle.END if self._is_nothing_left else Idle.WAIT)

    # -- other workers -----------------------------------------------------------------------------

    def _refresh(self) -> None:
        self._has_stored = False
        self._tell_sampler(self._study.shared.refresh(), notify=True)

    def _tell_sampler(self, records: Iterable[TrialRecord], *, notify: bool) -> None:
        """Tell the sampler the finished trials, and the listener too with `notify`.

        They come in the order of their results, so that the samplers of all workers and of every
        later search are told the same.
        """
        for record in records:
            if record.is_finished:
                self._finished_of_class[record.config.numerics_class].append(record)
                values = self._objective_encoder.to_optuna_values(record)
                with self._timed_as_sampler():
                    self._optuna.tell(record.config, values)
                if notify:
                    self._study.listener(TrialEnded(record=record))
                    self._say_if_cap_is_loose(record)

    def _say_if_cap_is_loose(self, record: TrialRecord) -> None:
        """Say it as soon as the baseline has ended: a smaller cap is another study."""
        if record.config != self._baseline:
            return
        if sentence := loose_cap_sentence(record, cap_bytes=self._study.definition.cap_bytes):
            self._study.listener(Notice(message=sentence))

    # -- the next configuration --------------------------------------------------------------------

    def _next(self, place: TrialPlace) -> Step | None:
        """Returns what a place is to do next; None when there is nothing for it at the moment.

        Poison trials, whose attempts ended their workers, run last.
        """
        self._last_event = None
        return (
            self._aside(place)
            or self._unfinished(poison=False)
            or self._new()
            or self._unfinished(poison=True)
        )

    def _claim(self, config: TrainingConfig, *, name: str | None = None) -> Trial | None:
        """Returns an attempt at the configuration; None if another worker has claimed it."""
        attempt = self._study.shared.claim(config, most_trials=self._trials_wanted, name=name)
        if attempt is None:
            self._refresh()
            return None
        return Trial(attempt=attempt, config=config)

    def _trials_here(self) -> list[Trial]:
        """Returns the trials in flight."""
        return [step for step in self._at_work.values() if isinstance(step, Trial)]

    def _predicted_now(self) -> list[TrainingConfig]:
        """Returns the suggestions that are being predicted, and have no trial yet."""
        return [step.config for step in self._at_work.values() if isinstance(step, Predict)]

    def _unfinished(self, *, poison: bool) -> Trial | None:
        """Returns a trial that has no result, is not running, and has attempts left."""
        here = {trial.attempt.number for trial in self._trials_here()}
        excluded = self._study.shared.running | self._study.shared.failed_too_often | here
        for number in sorted(self._study.shared.unfinished.keys() - excluded):
            if (number in self._study.shared.poison_trials) != poison:
                continue
            record = self._study.shared.unfinished[number]
            if trial := self._claim(record.config, name=record.name):
                return trial
        return None

    def _new(self) -> Trial | Predict | None:
        """Returns a trial of a new configuration, or a prediction before the choice of one."""
        if not self._has_room():
            return None
        left = self._named_left()
        if left and self._baseline in self._predicted_now():
            return None  # another place predicts it, and then the order is known
        if left and self._is_baseline_to_be_predicted():
            return Predict(config=self._baseline)
        for name, config in self._named_next(left):
            if step := self._named_step(name, config):
                return step
            if not self._has_room():
                return None  # other workers have begun the last trials
        if step := self._suggested():
            return step
        # Where nothing else is left there is time for the baseline.
        claimed = (self._claim(config, name=name) for name, config in left)
        return next((trial for trial in claimed if trial is not None), None)

    def _named_step(self, name: str, config: TrainingConfig) -> Trial | Predict | None:
        """Returns a named configuration, or its prediction, after which it may have to wait."""
        if config == self._baseline or self._study.prediction_cache.is_known(config):
            return self._claim(config, name=name)
        return Predict(config=config)

    def _named_left(self) -> list[Named]:
        """Returns the baseline and the named configurations that have no trial yet."""
        records = self._study.shared.records.values()
        trials = self._trials_here()
        return self._named.left(
            {*(record.config for record in records), *(trial.config for trial in trials)},
            names={*(record.name for record in records), *(one.attempt.name for one in trials)},
        )

    def _named_next(self, left: Sequence[Named]) -> list[Named]:
        """Returns those of `left` that may be tried now, in order."""
        predicting = self._predicted_now()
        return self._named.next(
            [(name, config) for name, config in left if config not in predicting],
            self._finished_records(),
            expected=self._expected_step(),
            memory=self._memory_model(),
        )

    def _finished_records(self) -> list[TrialRecord]:
        return [record for record in self._study.shared.records.values() if record.is_finished]

    def _memory_model(self) -> MemoryModel:
        return MemoryModel(
            self._finished_records(),
            list(self._study.prediction_cache.known.values()),
            cap_bytes=self._study.definition.cap_bytes,
            expected=self._expected_step(),
        )

    def _is_baseline_to_be_predicted(self) -> bool:
        """Whether the baseline of a CUDA device, by which all others are ordered, is not yet."""
        is_known = self._study.prediction_cache.is_known(self._baseline)
        return not is_known and self._study.definition.device.type != "cpu"

    def _expected_step(self) -> ExpectedStep | None:
        """Returns what steps are expected to take, once the baseline is predicted."""
        if self._expected is None:
            forecast = self._study.prediction_cache.known.get(self._baseline.fingerprint)
            prediction = None if forecast is None else forecast.prediction
            self._expected = ExpectedStep.of(self._study.definition, prediction)
            if self._expected is not None:
                self._ranking.expect(self._expected)
        return self._expected

    def _has_room(self) -> bool:
        """Returns whether another trial may begin; those of this round are not in the records."""
        not_read = sum(
            trial.config.fingerprint not in self._study.shared.records
            for trial in self._trials_here()
        )
        begun = len(self._study.shared.records) + not_read
        return begun + len(self._predicted_now()) < self._trials_wanted

    def _suggested(self) -> Trial | Predict | None:
        """Returns a configuration without a trial; None when none is left, or worth it."""
        if self._legal.values and self._study.definition.sampler == "ehvi":
            return self._most_promising()
        for config in self._suggested_by_optuna():
            self._check_stop()
            if step := self._unless_known(config):
                return step
            if not self._has_room():
                return None  # other workers have begun the last trials
        self._last_event = SpaceExhausted(trials=len(self._study.shared.records))
        return None

    def _suggested_by_optuna(self) -> Iterator[TrainingConfig]:
        """Yield what its sampler suggests, then all that has no trial yet, in the space's order."""
        if self._legal.values and self._study.definition.sampler != "grid":
            in_flight = self._in_flight()
            for repeat in range(len(in_flight), len(in_flight) + REPEATS_BEFORE_DRAWING):
                with self._timed_as_sampler():
                    config = self._optuna.ask(repeat=repeat, in_flight=in_flight)
                yield config
        yield from self._optuna.unseen(set(self._study.shared.records))

    def _unless_known(self, config: TrainingConfig) -> Trial | Predict | None:
        """Returns a trial of it, or its prediction before that.

        None where it has a trial already, or one of the same compiled program has.
        """
        if config.fingerprint in self._study.shared.records:
            return None
        if not self._study.prediction_cache.is_known(config):
            return None if config in self._predicted_now() else Predict(config=config)
        same = self._study.prediction_cache.same_program(
            config, self._study.shared.records.values()
        )
        if same is None:
            return self._claim(config)
        if config in self._predicted_here:
            self._predicted_here.remove(config)
            self._study.listener(SameProgram(config=config, number=same.number))
        return None

    def _most_promising(self) -> Trial | Predict | None:
        """Returns the configuration of the largest expected hypervolume improvement.

        Its memory is predicted first, after which another configuration may be the best.
        """
        choice = self._choose()
        if choice is None:
            self._last_event = SpaceExhausted(trials=len(self._study.shared.records))
            return None
        if self._until_converged and choice.relative_improvement < CONVERGED_IMPROVEMENT:
            self._last_event = Converged(
                trials=len(self._study.shared.records),
                relative_improvement=choice.relative_improvement,
            )
            return None
        if choice.surely_fits and choice.config.activation_budget == NO_LIMIT:
            self._study.prediction_cache.mark_not_needed(choice.config)
        if self._study.prediction_cache.is_known(choice.config):
            return self._claim(choice.config)
        return Predict(config=choice.config)

    def _choose(self) -> Choice | None:
        """Returns the next suggestion of this round; None where there is none."""
        self._check_stop()
        with self._timed_as_sampler():
            if self._suggestions is None:
                self._suggestions = self._new_suggestions()
            for choice in self._suggestions:
                if not self._runs_its_program(choice.config):
                    return choice
            return None

    def _runs_its_program(self, config: TrainingConfig) -> bool:
        """Returns whether a trial in flight compiles to the program of the configuration."""
        known = self._study.prediction_cache.known
        forecast = known.get(config.fingerprint)
        if forecast is None or forecast.plan is None:
            return False
        running = [known.get(trial.config.fingerprint) for trial in self._trials_here()]
        return any(other is not None and other.plan == forecast.plan for other in running)

    def _new_suggestions(self) -> Iterator[Choice]:
        self._expected_step()
        records = list(self._study.shared.records.values())
        finished = [record for record in records if record.is_finished]
        in_flight = self._in_flight()
        not_to_train = self._study.prediction_cache.not_to_train(
            [*(record.config for record in finished), *in_flight],
            limit_bytes=self._study.definition.cap_bytes,
        )
        return self._ranking.suggestions(
            with_neutral_perplexities(finished),
            self._study.prediction_cache.known.values(),
            excluded=[*(record.config for record in records), *in_flight, *not_to_train],
            seed=derived_seed(
                self._study.definition.seed, told=len(finished), repeat=len(in_flight)
            ),
            in_flight=in_flight,
            predicts=self._study.prediction_cache.predicts,
        )

    def _in_flight(self) -> list[TrainingConfig]:
        """Returns the configurations that run or are predicted now, of all processes, in order."""
        running = [
            record.config
            for number, record in sorted(self._study.shared.unfinished.items())
            if number in self._study.shared.running
        ]
        running += [trial.config for trial in self._trials_here()]
        return list(dict.fromkeys([*running, *self._predicted_now()]))

    @contextmanager
    def _timed_as_sampler(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds_in_sampler += time.perf_counter() - began

    def _predict(self, place: TrialPlace, config: TrainingConfig) -> Flow[None]:
        """Predict a configuration; one whose process is lost each time is trained unpredicted."""
        self._study.listener(_of_place(Predicting(config=config), place))
        predict = self._predictor(place)
        yield from self._beside.wait_for(config, predict)
        if self._study.prediction_cache.is_known(config):
            return
        for attempts_left in reversed(range(MAX_RETRIES + 1)):
            try:
                forecast = yield from predict(config)
                break
            except TrialLost as error:
                if attempts_left:
                    continue  # something outside killed the process of the prediction
                if place.is_lost():
                    raise
                reason = f"its process was lost each time: {error.message}"
                forecast = Forecast(config=config, error=reason)
        self._study.prediction_cache.add(forecast)

    def _predictor(self, place: TrialPlace) -> Predictor:
        return place.predict or self._study.prediction_cache.predict

    # -- beside a trial ----------------------------------------------------------------------------

    def _predict_beside(self, place: TrialPlace) -> Flow[None]:
        """Predict what may come next while the place is at work, until all ends.

        The trial server stops such a prediction while a training is timed, and what comes next is
        not chosen meanwhile either.
        """
        while True:
            is_free = place in self._at_work and not self._runner(place).is_timed
            config = self._likely_next() if is_free else None
            if config is None:
                yield Pause(_SECONDS_BETWEEN_POLLS, unless=self._news, clock=self._study.clock)
            else:
                yield from self._beside.predict(config, self._predictor(place))

    def _likely_next(self) -> TrainingConfig | None:
        """Returns a configuration that may come next and has no forecast; None without any."""
        if self._is_time_up() or not self._has_room():
            return None
        with self._timed_as_sampler():
            if self._likely is None:
                self._likely = self._likely_after_this_round()
            return next(filter(self._beside.wants, self._likely), None)

    def _likely_after_this_round(self) -> Iterator[TrainingConfig]:
        """Yield the named configurations, then the suggestions that have followed the round's."""
        for _, config in self._named_next(self._named_left()):
            if config != self._baseline:
                yield config
        if not self._legal.values or self._study.definition.sampler != "ehvi":
            return  # what these suggest depends on the result of the trial
        if self._suggestions is None:
            self._suggestions = self._new_suggestions()
        for choice in islice(self._suggestions, _MOST_LIKELY):
            if not choice.surely_fits:
                yield choice.config

    def _is_time_up(self) -> bool:
        """Whether no more is to begin; raises Stopped, also while all places are at work."""
        self._check_stop()
        if self._deadline is None or not self._study.shared.records:
            return False  # a study has one trial at least
        return self._study.clock() >= self._deadline

    def _check_stop(self) -> None:
        if self._should_stop():
            raise Stopped("the search was stopped", hint="run the same command again to continue")

    # -- what is measured beside trials ------------------------------------------------------------

    def _aside(self, place: TrialPlace) -> Aside | None:
        """Returns what is measured before the next trial.

        That is the perplexity of pretrained weights, once for the study (one that has failed is
        measured again by the next search), and the speed of the baseline, once for every
        TRIALS_PER_REPEAT trials: how much it differs from time to time is the noise of every speed
        that is measured once. It is always measured on the first place, since two devices differ,
        too.
        """
        if self._wants_initial_perplexity:
            self._wants_initial_perplexity = False
            known = initial_perplexity_of(self._study.shared.confirmations())
            if known is None or known.perplexity is None:
                return Aside.INITIAL_PERPLEXITY
        if not self._repeats_baseline or place is not self._places.first:
            return None
        baseline = self._study.shared.records.get(self._baseline.fingerprint)
        if baseline is None or baseline.reused_from is not None:
            return None
        if baseline.tokens_per_second is None:
            return None
        records = list(self._study.shared.records.values())
        confirmations = self._study.shared.confirmations()
        self._speed_noise = speed_noise(records, confirmations).alone
        trained = sum(record.was_trained for record in records)
        is_due = self._baselines_repeated() < trained // TRIALS_PER_REPEAT
        return Aside.REPEAT_BASELINE if is_due else None

    def _baselines_repeated(self) -> int:
        return sum(isinstance(one, RepeatedSpeed) for one in self._study.shared.confirmations())

    def _measure_initial_perplexity(self, place: TrialPlace) -> Flow[None]:
        """Measure the perplexity before training; at another place where this one is lost."""
        self._study.listener(_of_place(Confirming(doing="the perplexity before training"), place))
        began = place.clock()
        try:
            measured = yield from self._runner(place).evaluate_untrained()
        except TrialLost as error:
            try:
                yield from place.executor.checking_device(place.device.device)
            except TrialLost:
                self._wants_initial_perplexity = True  # at another place
                raise
            measured = InitialPerplexity(
                config=self._baseline,
                perplexity=None,
                failure=error.message,
                seconds=place.clock() - began,
            )
        self._study.shared.store_confirmation(measured)
        if measured.failure:
            self._study.listener(
                Notice(message=f"the perplexity before training: {measured.failure}")
            )

    def _repeat_baseline(self, place: TrialPlace) -> Flow[None]:
        doing = "the baseline again, to see how noisy the device is"
        self._study.listener(_of_place(Confirming(doing=doing), place))
        number = self._study.shared.records[self._baseline.fingerprint].number
        log_name = f"trial-{number}-repeat-{self._baselines_repeated() + 1}"
        began = place.clock()
        try:
            repeated = yield from self._runner(place).repeat_speed(
                self._baseline, log_name=log_name
            )
        except TrialLost as error:
            yield from place.executor.checking_device(place.device.device)
            repeated = RepeatedSpeed(
                config=self._baseline,
                tokens_per_second=None,
                failure=error.message,
                seconds=place.clock() - began,
            )
        self._study.shared.store_confirmation(repeated)
        records = list(self._study.shared.records.values())
        self._speed_noise = speed_noise(records, self._study.shared.confirmations()).alone


def _of_place(event: Event, place: TrialPlace) -> Event:
    """Returns the event with the name of its place, where a search has several."""
    if place.name and isinstance(event, EVENTS_OF_A_PLACE):
        return replace(event, device=place.name)
    return event
