"""Main loop: pick the next configuration, run it, store the result. Safe for several processes.

It keeps every place (`places.py`) of the search at work. While a place holds its device slot, the
loop reads the results of other processes, picks a configuration, claims the trial, has the place
run it and stores the result. Places that are ready at once are served in one round, with what was
known at its beginning. No configuration runs twice: a suggestion that has a trial already is
skipped, and so is one that compiles to a program that has run. A configuration predicted to be over
the cap is not run at all. What runs elsewhere at that moment takes part in each choice.

Not here: how a configuration is chosen (`sampler/`), how a trial is run and judged
(`trial_runner.py`), and who may store which result (`storage/attempts.py`).
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from autotune.analysis.confirmed_speed import PRIOR_NOISE_ALONE, speed_noise
from autotune.analysis.counting_perplexity import with_neutral_perplexities
from autotune.analysis.expected_step import ExpectedStep
from autotune.analysis.loose_cap import loose_cap_sentence
from autotune.errors import Stopped, StorageUnavailable, StorageUnreachable, TrialLost
from autotune.execution.local import POLL_SECONDS, LocalExecutor
from autotune.spec.attempt import MAX_RETRIES, Attempt, FinishedTrial
from autotune.spec.config import TrainingConfig
from autotune.spec.confirmation import InitialPerplexity, RepeatedSpeed, initial_perplexity_of
from autotune.spec.prediction import Forecast
from autotune.spec.result import TrialRecord
from autotune.spec.search_space import LegalSpace
from autotune.study.events import (
    EVENTS_OF_A_PLACE,
    BudgetSpent,
    Confirming,
    Converged,
    Event,
    Notice,
    PlaceLeft,
    Predicting,
    SameProgram,
    SpaceExhausted,
    TrialBegan,
    TrialEnded,
    WaitingForOthers,
)
from autotune.study.running.named_order import Named, NamedOrder, is_unlikely
from autotune.study.running.places import EndedWork, OnePlace, TrialPlace, TrialPlaces
from autotune.study.running.running_study import RunningStudy
from autotune.study.running.trial_runner import Once, TrialRunner
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

_SECONDS_BETWEEN_POLLS = 0.5
"""How often the loop reads what other processes have done, while it cannot begin anything."""


class _LeaseLost(Exception):
    """The attempt's lease has expired, and another worker may run its trial now."""


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """A trial in flight."""

    attempt: Attempt
    config: TrainingConfig
    lease: HeldLease
    held: ExitStack
    """Renews the lease until it is closed."""


class StudySession:
    """One process's part of a study: what it knows of the results, and the loop that runs trials.

    It runs one trial at a time with `executor` while it has a slot on the device, or one at a time
    on each of `places`, of which `executor` is that of the first.
    """

    def __init__(
        self,
        study: RunningStudy,
        *,
        executor: LocalExecutor,
        should_stop: Callable[[], bool],
        until_converged: bool = False,
        repeats_baseline: bool = False,
        places: TrialPlaces | None = None,
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
        self._ending: Event | None = None
        self._tell_sampler(study.shared.records.values(), notify=False)
        if places is None:
            place = TrialPlace(executor=executor, device=definition.device, clock=study.clock)
            places = OnePlace(place, listener=study.listener)
        self._places = places
        self._runners: dict[TrialPlace, TrialRunner] = {}
        self._may_note_evaluation = Once()
        self._after_work: dict[TrialPlace, Callable[[TrialPlace, Future[Any]], None]] = {}
        """What to do with the result of the work at a place."""
        self._ready: list[TrialPlace] = []
        """Taken places that have nothing to do."""
        self._suggestions: Iterator[Choice] | None = None
        """What to begin next, by what was known at the beginning of this round."""
        self._predicting: dict[TrialPlace, TrainingConfig] = {}
        """Suggestions that are being predicted, and have no trial yet."""
        self._trials: dict[TrialPlace, _Trial] = {}
        """The trials in flight."""
        self._ended: list[EndedWork] = []
        """Works whose result was not looked at yet."""

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
                    listener=lambda event: self._study.listener(_named(event, place)),
                    clock=place.clock,
                ),
                executor=place.executor,
                check_stop=lambda: self._check_stop(place),
                may_note_evaluation=self._may_note_evaluation,
                poll_seconds=place.poll_seconds,
            )
        return self._runners[place]

    def run(self, *, trials_wanted: int, deadline: float | None) -> None:
        """Run until the study has `trials_wanted` configurations, or the clock passes `deadline`.

        Raises Stopped on a request to stop, TrialLost when no device works any longer, and
        StorageUnreachable when the database stays unreachable. However it ends, no measurement is
        lost.
        """
        self._trials_wanted = trials_wanted
        self._deadline = deadline
        try:
            self._run_trials()
        except BaseException as error:
            self._end_trials(stores=not isinstance(error, StorageUnreachable))
            raise
        self._places.end_all()  # a place may still wait for its device
        if self._is_over() and len(self._study.shared.records) < trials_wanted:
            self._ending = BudgetSpent(
                trials=len(self._study.shared.records), trials_wanted=trials_wanted
            )
        if self._ending is not None:
            self._study.listener(self._ending)
        self._say_what_was_not_tried()

    def _say_what_was_not_tried(self) -> None:
        """Name the configurations of the space's file that had no turn, with the reason."""
        left = [one for one in self._named_left() if one[1] != self._baseline]
        memory = self._memory_model()
        unlikely = [name for name, config in left if is_unlikely(config, memory)]
        names = [name for name, _ in left if name not in unlikely]
        if unlikely:
            message = f"not tried, as they probably need more than the cap: {', '.join(unlikely)}"
            self._study.listener(Notice(message=message))
        if names and isinstance(self._ending, BudgetSpent):
            self._study.listener(Notice(message=f"not tried for lack of time: {', '.join(names)}"))

    def _run_trials(self) -> None:
        while not self._is_over():
            revision = self._study.shared.revision
            while (place := self._places.take()) is not None:
                self._ready.append(place)
            had_places = bool(self._ready)
            if had_places:
                self._refresh()
                if self._begin_round():
                    self._settle_ended(self._places.wait(0.0))
                    continue
                if self._study.shared.revision != revision:
                    continue
            if self._after_work:
                self._wait_for_an_end(or_a_place=not had_places)
            elif not had_places:
                self._settle_ended(self._places.wait(POLL_SECONDS))
            elif self._study.shared.running:
                self._wait_for_others()
            else:
                break
        while self._after_work:
            self._wait_for_an_end(or_a_place=False)
        self._leave_ready()

    def _begin_round(self) -> bool:
        """Begin the next work at the ready places; return False where there is none.

        A round ends after SECONDS_OF_A_ROUND, so that what comes in meanwhile is looked at, or
        after twice the time that its first place took, so that no more than half of the time goes
        into fitting models; the places that are left are ready for the next one. Where one has
        nothing to do, the others have nothing either: they are left.
        """
        began_at = self._study.clock()
        ends_at = began_at + SECONDS_OF_A_ROUND
        self._suggestions = None
        has_begun = False
        while self._ready:
            place = self._ready[0]
            if not (
                self._begin_initial_perplexity(place)
                or self._begin_repeat_of_baseline(place)
                or self._begin_next(place)
            ):
                self._leave_ready()
                break
            self._ready.remove(place)
            now = self._study.clock()
            if not has_begun:
                ends_at = max(ends_at, began_at + 2 * (now - began_at))
            has_begun = True
            if now >= ends_at:
                break
        return has_begun

    # -- places ------------------------------------------------------------------------------------

    def _leave_ready(self) -> None:
        for place in self._ready:
            self._places.leave(place)
        self._ready = []

    def _begin(
        self,
        place: TrialPlace,
        work: Callable[[], Any],
        *,
        then: Callable[[TrialPlace, Future[Any]], None],
    ) -> None:
        """Begin a work; `then` gets place and result, and begins another or leaves the place."""
        self._after_work[place] = then
        self._places.begin(place, work)

    def _wait_for_an_end(self, *, or_a_place: bool) -> None:
        """Wait for the next work to end, and go on after half a second.

        `or_a_place`: or for a place to get its slot. Where there was nothing to begin at one place,
        another would have nothing either.
        """
        end = self._study.clock() + _SECONDS_BETWEEN_POLLS
        while True:
            self._check_stop()
            ended = self._places.wait(POLL_SECONDS)
            has_place = or_a_place and self._places.can_take
            if ended or has_place or self._study.clock() >= end:
                return self._settle_ended(ended)

    def _settle_ended(self, ended: Iterable[EndedWork]) -> None:
        """Do what is next at each place whose work has ended, and read the results."""
        self._ended += ended
        in_flight = len(self._trials)
        while self._ended:
            one = self._ended.pop(0)
            self._after_work.pop(one.place)(one.place, one.future)
        if len(self._trials) < in_flight:
            self._refresh()

    def _end_trials(self, *, stores: bool) -> None:
        """End everything in flight, and store or give back each trial.

        Without `stores`, as where the database is away, results wait on disk.
        """
        for ended in [*self._ended, *self._places.end_all()]:
            trial = self._trials.pop(ended.place, None)
            if trial is not None:
                with trial.held:
                    self._keep(trial, ended.future, stores=stores)
        for trial in self._trials.values():  # such as one whose prediction could not be stored
            with trial.held:
                self._study.shared.release_attempt(trial.attempt)
        self._trials = {}
        self._ended = []
        self._ready = []
        self._after_work = {}
        self._predicting = {}

    def _keep(self, trial: _Trial, future: Future[Any], *, stores: bool) -> None:
        finished = None
        if future.done() and future.exception() is None:
            finished = future.result()
        if not isinstance(finished, FinishedTrial):
            self._study.shared.release_attempt(trial.attempt)
        elif not stores:
            self._study.shared.keep_result(trial.attempt, finished)
        else:
            try:
                self._study.shared.store_result(trial.attempt, finished)
            except (StorageUnavailable, Stopped):
                pass  # it waits on disk

    # -- other workers -----------------------------------------------------------------------------

    def _refresh(self) -> None:
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

    def _wait_for_others(self) -> None:
        self._study.listener(WaitingForOthers(numbers=tuple(sorted(self._study.shared.running))))
        end = self._study.clock() + _SECONDS_BETWEEN_POLLS
        while self._study.clock() < end and not self._is_over():
            time.sleep(_SECONDS_BETWEEN_POLLS / 5)

    # -- the next configuration --------------------------------------------------------------------

    def _begin_next(self, place: TrialPlace) -> bool:
        """Begin a trial at a taken place, or the prediction of one that may come next.

        Return False when none is left, or none for this process at the moment. Poison trials, whose
        attempts ended their workers, run last. A place that turns out to be lost is dropped.
        """
        self._ending = None
        try:
            return (
                self._begin_unfinished(place, poison=False)
                or self._begin_new(place)
                or self._begin_unfinished(place, poison=True)
            )
        except TrialLost as error:  # of a prediction in this thread
            if not place.is_lost():
                raise
            self._lose(place, error)
            return True

    def _begin_unfinished(self, place: TrialPlace, *, poison: bool) -> bool:
        """Begin a trial that has no result, is not running, and has attempts left."""
        here = {trial.attempt.number for trial in self._trials.values()}
        excluded = self._study.shared.running | self._study.shared.failed_too_often | here
        for number in sorted(self._study.shared.unfinished.keys() - excluded):
            if (number in self._study.shared.poison_trials) != poison:
                continue
            record = self._study.shared.unfinished[number]
            if self._begin_trial(place, record.config, name=record.name):
                return True
        return False

    def _begin_new(self, place: TrialPlace) -> bool:
        if not self._has_room():
            return False
        left = self._named_left()
        if left and self._baseline in self._predicting.values():
            return False  # another place predicts it, and then the order is known
        if left and self._begin_prediction_of_baseline(place):
            return True
        for name, config in self._named_next(left):
            if self._begin_named(place, name, config):
                return True
            if not self._has_room():
                return False  # other workers have begun the last trials
        if self._begin_suggestion(place):
            return True
        # Where nothing else is left there is time for the baseline.
        return any(self._begin_trial(place, config, name=name) for name, config in left)

    def _begin_named(self, place: TrialPlace, name: str, config: TrainingConfig) -> bool:
        """Begin a named configuration, or its prediction, after which it may have to wait."""
        if config == self._baseline or self._study.prediction_cache.is_known(config):
            return self._begin_trial(place, config, name=name)
        self._predicting[place] = config
        self._begin_prediction(place, config, then=self._after_suggestion_is_predicted)
        return True

    def _named_left(self) -> list[Named]:
        """Returns the baseline and the named configurations that have no trial yet."""
        records = self._study.shared.records.values()
        trials = self._trials.values()
        return self._named.left(
            {*(record.config for record in records), *(trial.config for trial in trials)},
            names={*(record.name for record in records), *(one.attempt.name for one in trials)},
        )

    def _named_next(self, left: Sequence[Named]) -> list[Named]:
        """Returns those of `left` that may be tried now, in order."""
        return self._named.next(
            [(name, config) for name, config in left if config not in self._predicting.values()],
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

    def _begin_prediction_of_baseline(self, place: TrialPlace) -> bool:
        """Predict the baseline of a CUDA device, by which the order of all others is decided."""
        is_known = self._study.prediction_cache.is_known(self._baseline)
        if is_known or self._study.definition.device.type == "cpu":
            return False
        self._predicting[place] = self._baseline
        self._begin_prediction(place, self._baseline, then=self._after_suggestion_is_predicted)
        return True

    def _expected_step(self) -> ExpectedStep | None:
        """Returns what steps are expected to take, once the baseline is predicted."""
        if self._expected is None:
            forecast = self._study.prediction_cache.known.get(self._baseline.fingerprint)
            prediction = None if forecast is None else forecast.prediction
            self._expected = ExpectedStep.of(self._study.definition, prediction)
            if self._expected is not None:
                self._ranking.expect(self._expected)
        return self._expected

    def _has_trial(self, config: TrainingConfig) -> bool:
        if config.fingerprint in self._study.shared.records:
            return True
        return any(trial.config == config for trial in self._trials.values())

    def _has_room(self) -> bool:
        """Returns whether another trial may begin; those of this round are not in the records."""
        not_read = sum(
            trial.config.fingerprint not in self._study.shared.records
            for trial in self._trials.values()
        )
        begun = len(self._study.shared.records) + not_read
        return begun + len(self._predicting) < self._trials_wanted

    def _begin_suggestion(self, place: TrialPlace) -> bool:
        """Begin a configuration without a trial; return False when none is left, or worth it."""
        if self._legal.values and self._study.definition.sampler == "ehvi":
            return self._begin_most_promising(place)
        if self._legal.values and self._study.definition.sampler != "grid":
            in_flight = self._in_flight()
            for repeat in range(len(in_flight), len(in_flight) + REPEATS_BEFORE_DRAWING):
                self._check_stop()
                with self._timed_as_sampler():
                    config = self._optuna.ask(repeat=repeat, in_flight=in_flight)
                if not self._is_known(config, place) and self._begin_trial(place, config):
                    return True
                if not self._has_room():
                    return False  # other workers have begun the last trials
        for config in self._optuna.unseen(set(self._study.shared.records)):
            self._check_stop()
            if not self._is_known(config, place) and self._begin_trial(place, config):
                return True
            if not self._has_room():
                return False
        self._ending = SpaceExhausted(trials=len(self._study.shared.records))
        return False

    def _begin_most_promising(self, place: TrialPlace) -> bool:
        """Begin the configuration of the largest expected hypervolume improvement.

        Its memory is predicted first, after which another configuration may be the best.
        """
        choice = self._choose()
        if choice is None:
            self._ending = SpaceExhausted(trials=len(self._study.shared.records))
            return False
        if self._until_converged and choice.relative_improvement < CONVERGED_IMPROVEMENT:
            self._ending = Converged(
                trials=len(self._study.shared.records),
                relative_improvement=choice.relative_improvement,
            )
            return False
        if choice.surely_fits:
            self._study.prediction_cache.mark_not_needed(choice.config)
        if self._study.prediction_cache.is_known(choice.config):
            return self._begin_trial(place, choice.config)
        self._predicting[place] = choice.config
        self._begin_prediction(place, choice.config, then=self._after_suggestion_is_predicted)
        return True

    def _after_suggestion_is_predicted(self, place: TrialPlace, future: Future[Forecast]) -> None:
        del self._predicting[place]
        try:
            forecast = future.result()
        except TrialLost as error:
            if not place.is_lost():
                raise
            self._lose(place, error)
            return
        self._study.prediction_cache.add(forecast)
        self._ready.append(place)

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
        running = [known.get(trial.config.fingerprint) for trial in self._trials.values()]
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
        running += [trial.config for trial in self._trials.values()]
        return list(dict.fromkeys([*running, *self._predicting.values()]))

    @contextmanager
    def _timed_as_sampler(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds_in_sampler += time.perf_counter() - began

    def _is_known(self, config: TrainingConfig, place: TrialPlace) -> bool:
        """Returns whether there is a trial of it, or one of the same compiled program.

        It is predicted at the place that would run it, which has nothing else to do.
        """
        if config.fingerprint in self._study.shared.records:
            return True
        was_predicted = self._study.prediction_cache.is_known(config)
        self._predict(config, place)
        same = self._study.prediction_cache.same_program(
            config, self._study.shared.records.values()
        )
        if same is not None and not was_predicted:
            self._study.listener(SameProgram(config=config, number=same.number))
        return same is not None

    def _predict(self, config: TrainingConfig, place: TrialPlace) -> None:
        if self._study.prediction_cache.is_known(config):
            return
        self._study.listener(_named(Predicting(config=config), place))
        self._study.prediction_cache.add(self._forecast(place, config))

    def _begin_prediction(
        self,
        place: TrialPlace,
        config: TrainingConfig,
        *,
        then: Callable[[TrialPlace, Future[Forecast]], None],
    ) -> None:
        self._study.listener(_named(Predicting(config=config), place))
        self._begin(place, lambda: self._forecast(place, config), then=then)

    def _forecast(self, place: TrialPlace, config: TrainingConfig) -> Forecast:
        """Predict a configuration; one whose process is lost each time is trained unpredicted."""
        predict = place.predict or self._study.prediction_cache.predict
        for _ in range(MAX_RETRIES):
            try:
                return predict(config)
            except TrialLost:
                continue  # something outside killed the process of the prediction
        try:
            return predict(config)
        except TrialLost as error:
            if place.is_lost():
                raise
            return Forecast(config=config, error=f"its process was lost each time: {error.message}")

    def _is_over(self) -> bool:
        self._check_stop()
        if self._deadline is None or not self._study.shared.records:
            return False  # a study has one trial at least
        return self._study.clock() >= self._deadline

    def _check_stop(self, place: TrialPlace | None = None) -> None:
        if self._should_stop():
            raise Stopped("the search was stopped", hint="run the same command again to continue")
        trial = None if place is None else self._trials.get(place)
        if trial is not None and trial.lease.is_lost:
            raise _LeaseLost

    # -- before any training ---------------------------------------------------------------------

    def _begin_initial_perplexity(self, place: TrialPlace) -> bool:
        """Measure the perplexity of pretrained weights, once for the study, before the trials.

        One that has failed is measured again by the next search.
        """
        if not self._wants_initial_perplexity:
            return False
        self._wants_initial_perplexity = False
        known = initial_perplexity_of(self._study.shared.confirmations())
        if known is not None and known.perplexity is not None:
            return False
        self._study.listener(_named(Confirming(doing="the perplexity before training"), place))
        self._begin(
            place, lambda: self._evaluate_untrained(place), then=self._store_initial_perplexity
        )
        return True

    def _evaluate_untrained(self, place: TrialPlace) -> InitialPerplexity:
        """Returns the perplexity before training. Raises TrialLost where the device is lost."""
        began = place.clock()
        try:
            return self._runner(place).evaluate_untrained()
        except TrialLost as error:
            place.executor.check_device(place.device.device)
            return InitialPerplexity(
                config=self._baseline,
                perplexity=None,
                failure=error.message,
                seconds=place.clock() - began,
            )

    def _store_initial_perplexity(
        self, place: TrialPlace, future: Future[InitialPerplexity]
    ) -> None:
        try:
            measured = future.result()
        except TrialLost as error:
            self._wants_initial_perplexity = True  # at another place
            self._lose(place, error)
            return
        self._study.shared.store_confirmation(measured)
        if measured.failure:
            self._study.listener(
                Notice(message=f"the perplexity before training: {measured.failure}")
            )
        self._ready.append(place)

    # -- how noisy the device is -------------------------------------------------------------------

    def _begin_repeat_of_baseline(self, place: TrialPlace) -> bool:
        """Measure the speed of the baseline again, once for every TRIALS_PER_REPEAT trials.

        How much it differs from time to time is the noise of every speed that is measured once. It
        is always measured on the first place, since two devices differ, too.
        """
        if not self._repeats_baseline or place is not self._places.first:
            return False
        records = list(self._study.shared.records.values())
        baseline = self._study.shared.records.get(self._baseline.fingerprint)
        was_timed = baseline is not None and baseline.tokens_per_second is not None
        if baseline is None or not was_timed or baseline.reused_from is not None:
            return False
        confirmations = self._study.shared.confirmations()
        self._speed_noise = speed_noise(records, confirmations).alone
        done = sum(isinstance(one, RepeatedSpeed) for one in confirmations)
        trained = sum(record.was_trained for record in records)
        if done >= trained // TRIALS_PER_REPEAT:
            return False
        doing = "the baseline again, to see how noisy the device is"
        self._study.listener(_named(Confirming(doing=doing), place))
        log_name = f"trial-{baseline.number}-repeat-{done + 1}"
        self._begin(
            place, lambda: self._repeat_baseline(place, log_name), then=self._store_repetition
        )
        return True

    def _repeat_baseline(self, place: TrialPlace, log_name: str) -> RepeatedSpeed:
        """Returns the speed. Raises TrialLost where the device no longer works."""
        began = place.clock()
        try:
            return self._runner(place).repeat_speed(self._baseline, log_name=log_name)
        except TrialLost as error:
            place.executor.check_device(place.device.device)
            return RepeatedSpeed(
                config=self._baseline,
                tokens_per_second=None,
                failure=error.message,
                seconds=place.clock() - began,
            )

    def _store_repetition(self, place: TrialPlace, future: Future[RepeatedSpeed]) -> None:
        try:
            repeated = future.result()
        except TrialLost as error:
            self._lose(place, error)
            return
        self._study.shared.store_confirmation(repeated)
        records = list(self._study.shared.records.values())
        self._speed_noise = speed_noise(records, self._study.shared.confirmations()).alone
        self._ready.append(place)

    # -- run and store -----------------------------------------------------------------------------

    def _begin_trial(
        self, place: TrialPlace, config: TrainingConfig, *, name: str | None = None
    ) -> bool:
        """Begin an attempt at the configuration; return False if another worker has claimed it."""
        attempt = self._study.shared.claim(config, most_trials=self._trials_wanted, name=name)
        if attempt is None:
            self._refresh()
            return False
        self._study.listener(
            TrialBegan(number=attempt.number, config=config, name=attempt.name, device=place.name)
        )
        with ExitStack() as stack:
            lease = stack.enter_context(self._study.shared.working_on(attempt))
            self._trials[place] = _Trial(
                attempt=attempt, config=config, lease=lease, held=stack.pop_all()
            )
        if self._study.prediction_cache.is_known(config):
            self._begin_training(place)
        else:
            self._begin_prediction(place, config, then=self._after_trial_is_predicted)
        return True

    def _after_trial_is_predicted(self, place: TrialPlace, future: Future[Forecast]) -> None:
        if future.exception() is not None:
            self._settle_trial(place, future)
            return
        self._study.prediction_cache.add(future.result())
        self._begin_training(place)

    def _begin_training(self, place: TrialPlace) -> None:
        trial, runner = self._trials[place], self._runner(place)
        records = tuple(self._finished_of_class[trial.config.numerics_class])
        speed_noise_now = self._speed_noise

        def train() -> FinishedTrial:
            finished = runner.measure(
                trial.config,
                log_name=trial.attempt.log_name,
                records=records,
                speed_noise=speed_noise_now,
            )
            if finished.measurement.outcome == "crashed" and place.device.type == "cuda":
                # A CUDA crash may be the device's fault. Raises TrialLost if it no longer works.
                place.executor.check_device(place.device.device)
            return finished

        self._begin(place, train, then=self._settle_trial)

    def _settle_trial(self, place: TrialPlace, future: Future[Any]) -> None:
        """Store the result of a trial, or what else became of its attempt."""
        trial = self._trials.pop(place)
        with trial.held:
            try:
                finished: FinishedTrial = future.result()
            except TrialLost as error:
                self._study.shared.record_failure(trial.attempt, cause=error.message)
                self._begin_check_of_device(place)
                return
            except _LeaseLost:
                self._places.leave(place)
                return
            except BaseException:
                self._study.shared.release_attempt(trial.attempt)
                raise
            failpoint("trial measured")
            self._study.shared.store_result(trial.attempt, finished)
        self._places.leave(place)

    def _begin_check_of_device(self, place: TrialPlace) -> None:
        device = place.device.device
        self._begin(
            place, lambda: place.executor.check_device(device), then=self._after_check_of_device
        )

    def _after_check_of_device(self, place: TrialPlace, future: Future[None]) -> None:
        try:
            future.result()
        except TrialLost as error:
            self._lose(place, error)
        else:
            self._places.leave(place)

    def _lose(self, place: TrialPlace, error: TrialLost) -> None:
        """Go on without a place whose device no longer works; raise where it is the last one."""
        if not self._places.can_lose_one:
            raise error
        self._places.drop(place)
        self._study.listener(PlaceLeft(device=place.name, reason=error.message))


def _named(event: Event, place: TrialPlace) -> Event:
    """Returns the event with the name of its place, where a search has several."""
    if place.name and isinstance(event, EVENTS_OF_A_PLACE):
        return replace(event, device=place.name)
    return event
