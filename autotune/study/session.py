"""The loop of a study: what next, run it, keep the result, tell the sampler. One process owns it.

A result is in the database, synced, before Optuna hears of it; what Optuna missed because the process died in
between is told at the next start. A configuration is never run twice: a repeated suggestion is answered from its
record, and so is one that compiles to the same program. What is predicted to be over the cap is not run at all.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from optuna.trial import Trial

from autotune.config import TrainingConfig
from autotune.definition import StudyDefinition
from autotune.errors import Stopped
from autotune.executors.local import LocalExecutor
from autotune.result import TrialRecord
from autotune.search_space import LegalSpace
from autotune.storage import StudyStore
from autotune.study.events import (
    BudgetSpent,
    Converged,
    Listener,
    Predicting,
    SameProgram,
    SpaceExhausted,
    TrialBegan,
    TrialEnded,
)
from autotune.study.foresight import Foresight
from autotune.study.measuring import Manner, Measuring
from autotune.study.observation import observe
from autotune.study.ranking import CONVERGED_GAIN, Choice, Ranking
from autotune.study.sampling import OptunaStudy, derived_seed

REPEATS_BEFORE_DRAWING = 50
"""After so many suggestions in a row that are known already, an unseen configuration is drawn."""


def possible_trials(definition: StudyDefinition, wanted: int) -> int:
    """`wanted`, or as many as there are in a space that only names configurations."""
    legal = definition.legal_space()
    if legal.values:
        return wanted
    baseline = definition.baseline_config()
    return min(wanted, len({config.fingerprint for config in [*legal.named.values(), baseline]}))


class StudySession:
    def __init__(
        self,
        definition: StudyDefinition,
        *,
        store: StudyStore,
        optuna_study: OptunaStudy,
        executor: LocalExecutor,
        foresight: Foresight,
        study_folder: Path,
        listener: Listener,
        should_stop: Callable[[], bool],
        manner: Manner,
        until_converged: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._definition = definition
        self._legal: LegalSpace = definition.legal_space()
        self._store = store
        self._optuna = optuna_study
        self._foresight = foresight
        self._listener = listener
        self._should_stop = should_stop
        self._until_converged = until_converged
        self._clock = clock
        self._ranking = Ranking(self._legal, cap_bytes=definition.cap_bytes)
        self.seconds_in_sampler = 0.0
        """Time in the sampler so far."""
        self._baseline = definition.baseline_config()
        self._records = {record.config.fingerprint: record for record in store.trials(definition.name)}
        self._measuring = Measuring(
            definition,
            baseline=self._baseline,
            executor=executor,
            foresight=foresight,
            study_folder=study_folder,
            manner=manner,
            listener=listener,
            check_stop=self._check_stop,
            clock=clock,
        )

    def run(self, *, trials_wanted: int, deadline: float | None) -> None:
        """Runs until the study has `trials_wanted` distinct configurations, or the clock passes `deadline`.

        Raises Stopped when asked to stop; whatever ends it early leaves no suggestion of Optuna's running.
        """
        try:
            self._run(trials_wanted=trials_wanted, deadline=deadline)
        except BaseException:
            self._optuna.give_up_running()
            raise

    def _run(self, *, trials_wanted: int, deadline: float | None) -> None:
        self._tell_what_was_missed()
        for record in [record for record in self._records.values() if not record.is_finished]:
            if not self._is_over(deadline):
                self._measure(record.config, name=record.name, number=record.number)
        for name, config in self._first_configurations():
            if len(self._records) < trials_wanted and not self._is_over(deadline):
                self._measure(config, name=name)
        while len(self._records) < trials_wanted and not self._is_over(deadline):
            if not self._measure_next_suggestion(deadline):
                return
        if len(self._records) < trials_wanted:
            self._listener(BudgetSpent(trials=len(self._records), trials_wanted=trials_wanted))

    # -- what next ---------------------------------------------------------------------------------------------

    def _first_configurations(self) -> list[tuple[str | None, TrainingConfig]]:
        """The baseline and the space's named configurations, as far as they have not been run."""
        names = {config.fingerprint: name for name, config in self._legal.named.items()}
        baseline_name = names.get(self._baseline.fingerprint, "baseline")
        first = [(baseline_name, self._baseline), *self._legal.named.items()]
        return list({c.fingerprint: (n, c) for n, c in first if c.fingerprint not in self._records}.values())

    def _measure_next_suggestion(self, deadline: float | None) -> bool:
        """Measures one configuration that was not seen; False when none is left, or none that is worth it."""
        if self._legal.values and self._definition.sampler == "ehvi":
            return self._measure_most_promising(deadline)
        if self._legal.values and self._definition.sampler != "grid":
            for _ in range(REPEATS_BEFORE_DRAWING):
                self._check_stop()
                trial, config = self._ask()
                known = self._known(config)
                if known is None:
                    self._measure(config, asked=trial)
                    return True
                self._tell(known, asked=trial)
        for config in self._optuna.unseen(set(self._records)):
            self._check_stop()
            if self._known(config) is None:
                self._measure(config)
                return True
        self._listener(SpaceExhausted(trials=len(self._records)))
        return False

    def _measure_most_promising(self, deadline: float | None) -> bool:
        """The best by all that is known; what is predicted for it first may make another the best."""
        while choice := self._choose():
            if self._until_converged and choice.relative_gain < CONVERGED_GAIN:
                self._listener(Converged(trials=len(self._records), relative_gain=choice.relative_gain))
                return False
            if choice.surely_fits:
                self._foresight.do_without(choice.config)
            if self._foresight.is_known(choice.config):
                self._measure(choice.config)
                return True
            self._predict(choice.config)
            if self._is_over(deadline):
                return True
        self._listener(SpaceExhausted(trials=len(self._records)))
        return False

    def _ask(self) -> tuple[Trial, TrainingConfig]:
        with self._in_sampler():
            return self._optuna.ask()

    def _choose(self) -> Choice | None:
        self._check_stop()
        records = list(self._records.values())
        beyond = self._foresight.not_to_train(records, limit_bytes=self._definition.cap_bytes)
        with self._in_sampler():
            return self._ranking.choose(
                records,
                self._foresight.known.values(),
                excluded={*(record.config for record in records), *beyond},
                seed=derived_seed(self._definition.seed, told=len(records)),
            )

    @contextmanager
    def _in_sampler(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds_in_sampler += time.perf_counter() - began

    def _known(self, config: TrainingConfig) -> TrialRecord | None:
        """What answers for a configuration without a new trial: its own record, or one of the same program."""
        if record := self._records.get(config.fingerprint):
            return record
        is_news = not self._foresight.is_known(config)
        self._predict(config)
        same = self._foresight.same_program(config, self._records.values())
        if same is not None and is_news:
            self._listener(SameProgram(config=config, number=same.number))
        return same

    def _predict(self, config: TrainingConfig) -> None:
        if not self._foresight.is_known(config):
            self._listener(Predicting(config=config))
            self._foresight.of(config)

    def _is_over(self, deadline: float | None) -> bool:
        self._check_stop()
        return deadline is not None and self._clock() >= deadline

    def _check_stop(self) -> None:
        if self._should_stop():
            raise Stopped("the search was stopped", hint="the same command goes on from here")

    # -- run, keep, tell ---------------------------------------------------------------------------------------

    def _measure(
        self,
        config: TrainingConfig,
        *,
        name: str | None = None,
        number: int | None = None,
        asked: Trial | None = None,
    ) -> None:
        number = len(self._records) if number is None else number
        self._store.begin_trial(self._definition.name, number, config, name=name)
        self._listener(TrialBegan(number=number, config=config, name=name))
        self._predict(config)
        finished = self._measuring.measure(config, number=number, records=self._records.values())
        self._store.finish_trial(self._definition.name, number, finished.measurement, seconds=finished.seconds)
        record = next(r for r in self._store.trials(self._definition.name) if r.number == number)
        self._records[config.fingerprint] = record
        self._tell(record, asked=asked)
        self._listener(TrialEnded(record=record))

    def _tell(self, record: TrialRecord, *, asked: Trial | None = None) -> None:
        observation = observe(
            record,
            self._records.values(),
            cap_bytes=self._definition.cap_bytes,
            vocab_size=self._definition.workload.vocab_size,
        )
        with self._in_sampler():
            if asked is None:
                self._optuna.add(record.number, record.config, observation)
            else:
                self._optuna.tell(asked, record.number, observation)

    def _tell_what_was_missed(self) -> None:
        for record in self._records.values():
            if record.is_finished and record.number not in self._optuna.told_numbers:
                self._tell(record)
