"""The study: ask, run, keep, tell. `search` runs one, `result_of` reads one, `plan` says what one would do."""

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import filelock
import optuna

from autotune.config import TrainingConfig
from autotune.definition import StudyDefinition
from autotune.errors import StudyMismatch
from autotune.executors.local import FinishedTrial, LocalExecutor
from autotune.recommendation.front import pareto_front
from autotune.recommendation.pick import DEFAULT_PREFERENCES, Preferences, choose
from autotune.result import StudyResult, TrialRecord
from autotune.search_space import LegalSpace
from autotune.storage import BUSY_TIMEOUT_SECONDS, StudyStore, sqlite_file
from autotune.study.events import Listener, Preparing, StudyOpened
from autotune.study.request import (
    DEFAULT_TRIALS,
    SearchRequest,
    check_same_device,
    check_same_study,
    new_definition,
    prepare_again,
    space_of,
    work_folder,
)
from autotune.study.sampling import OptunaStudy
from autotune.study.session import StudySession, baseline_config
from autotune.workload import MEMORY_STEPS, MINIMUM_TIMED_STEPS

__all__ = ["Plan", "SearchRequest", "plan", "result_of", "search"]


def search(
    request: SearchRequest,
    *,
    listener: Listener = lambda event: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> StudyResult:
    """Begins the study, or continues it, and returns what is known when it is done.

    Raises AutotuneError for what cannot be done as asked, and Stopped when `should_stop` says so; what was measured
    until then is kept, and the same call goes on from there.
    """
    space = None if _exists(request) else space_of(request)
    work = work_folder(request.storage)
    store = StudyStore(request.storage, create=True)
    try:
        if space is None:
            stored, _ = store.definition(request.name or "")
            check_same_study(request, stored)
        with LocalExecutor(work, should_stop=should_stop) as executor:
            if space is None:
                device, _ = executor.probe(request.device or stored.device.device, {})
                check_same_device(stored, device)
                definition = stored
                prepare_again(definition, executor=executor, folder=work / definition.name, listener=listener)
            else:
                definition = new_definition(request, space=space, executor=executor, work=work, listener=listener)
            with _owned(work / definition.name, definition.name):
                wanted = _settle(store, definition, request, listener)
                session = StudySession(
                    definition,
                    store=store,
                    optuna_study=_open_optuna(definition, request.storage),
                    executor=executor,
                    study_folder=work / definition.name,
                    listener=listener,
                    should_stop=should_stop,
                    time_limit_seconds=request.trial_time_limit_seconds,
                )
                budget = request.time_budget_seconds
                session.run(trials_wanted=wanted, deadline=None if budget is None else time.monotonic() + budget)
        return result_of(store, definition.name, request.preferences)
    finally:
        store.close()


def result_of(store: StudyStore, study: str, preferences: Preferences = DEFAULT_PREFERENCES) -> StudyResult:
    """Everything known of a study, with its front and pick. Raises UnknownStudy."""
    definition, _ = store.definition(study)
    records = store.trials(study)
    baseline = _baseline_of(definition, records)
    front = pareto_front(records, tolerance=preferences.tolerance)
    return StudyResult(
        study=study,
        storage=store.url,
        workload=definition.workload,
        device=definition.device,
        cap_bytes=definition.cap_bytes,
        trials=tuple(records),
        front=front,
        pick=choose(records, front, baseline=baseline, preferences=preferences),
        baseline=None if baseline is None else baseline.number,
    )


# -- opening -----------------------------------------------------------------------------------------------------


def _exists(request: SearchRequest) -> bool:
    file = sqlite_file(request.storage)
    if request.name is None or (file is not None and not file.exists()):
        return False
    store = StudyStore(request.storage, create=True)
    try:
        return store.has_study(request.name)
    finally:
        store.close()


def _settle(store: StudyStore, definition: StudyDefinition, request: SearchRequest, listener: Listener) -> int:
    """Creates the study or raises its total; returns how many trials are wanted of it."""
    is_new = not store.has_study(definition.name)
    if is_new:
        wanted = _possible_trials(definition, request.trials or DEFAULT_TRIALS)
        store.create_study(definition, trials_wanted=wanted)
    else:
        _, stored_wanted = store.definition(definition.name)
        wanted = _possible_trials(definition, request.trials) if request.trials else stored_wanted
        if wanted != stored_wanted:
            store.set_trials_wanted(definition.name, wanted)
    listener(
        StudyOpened(
            definition=definition,
            legal=definition.legal_space(),
            trials_wanted=wanted,
            records=tuple(store.trials(definition.name)),
            is_new=is_new,
        )
    )
    return wanted


def _possible_trials(definition: StudyDefinition, wanted: int) -> int:
    """`wanted`, or as many as there are in a space that only names configurations."""
    legal = definition.legal_space()
    if legal.values:
        return wanted
    baseline = baseline_config(definition.space, global_batch=definition.workload.global_batch)
    return min(wanted, len({config.fingerprint for config in [*legal.named.values(), baseline]}))


def _open_optuna(definition: StudyDefinition, storage: str) -> OptunaStudy:
    connect = {"timeout": BUSY_TIMEOUT_SECONDS} if sqlite_file(storage) else {}
    return OptunaStudy(
        definition.name,
        optuna.storages.RDBStorage(storage, engine_kwargs={"connect_args": connect}),
        legal=definition.legal_space(),
        sampler=definition.sampler,
        seed=definition.seed,
    )


@contextmanager
def _owned(folder: Path, study: str) -> Iterator[None]:
    """Holds the study for this process; the lock goes with the process, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise StudyMismatch(
            f"study {study!r} is being run by another process", hint="wait for it, or stop it first"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _baseline_of(definition: StudyDefinition, records: Iterable[TrialRecord]) -> TrialRecord | None:
    baseline = baseline_config(definition.space, global_batch=definition.workload.global_batch)
    return next((r for r in records if r.config == baseline and r.peak_memory_bytes is not None), None)


# -- what a search would do --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `search` would do, from short trainings of the baseline and of one compiled configuration."""

    definition: StudyDefinition
    legal: LegalSpace
    configurations: int
    """Number of legal configurations, the named ones included."""
    trials_wanted: int
    first: tuple[tuple[str, TrainingConfig], ...]
    seconds_per_trial: float | None
    """Of an eager training in the baseline's precision; None when the short training did not finish."""
    compile_seconds: float | None
    """What compiling adds to a trial; None when nothing in the space compiles."""
    compiled_share: float
    """Share of the legal configurations that compile."""

    @property
    def seconds(self) -> float | None:
        if self.seconds_per_trial is None:
            return None
        return self.trials_wanted * (self.seconds_per_trial + self.compiled_share * (self.compile_seconds or 0.0))


def plan(request: SearchRequest, *, listener: Listener = lambda event: None) -> Plan:
    """What a new study of this request would do; leaves nothing behind. Raises InvalidInput of every kind."""
    space = space_of(request)
    work = work_folder(request.storage)
    with LocalExecutor(work) as executor:
        named = replace(request, name=f"plan-{time.time_ns()}")
        definition = new_definition(named, space=space, executor=executor, work=work, listener=listener)
        folder = work / definition.name
        try:
            listener(Preparing(what="timing two short trainings"))
            return _plan(definition, request, executor=executor, folder=folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _plan(definition: StudyDefinition, request: SearchRequest, *, executor: LocalExecutor, folder: Path) -> Plan:
    legal = definition.legal_space()
    configurations = {c.fingerprint: c for c in [*legal.configurations(), *legal.named.values()]}
    baseline = baseline_config(definition.space, global_batch=definition.workload.global_batch)
    compiled = [config for config in configurations.values() if config.compile != "none"]
    short_steps = definition.workload.warmup_steps + MEMORY_STEPS + MINIMUM_TIMED_STEPS

    def short_training(config: TrainingConfig) -> FinishedTrial:
        future: Future[FinishedTrial] = executor.submit(
            definition,
            config,
            study_folder=folder,
            log_name="plan",
            enforce_cap=False,
            time_limit_seconds=request.trial_time_limit_seconds,
            workload=replace(definition.workload, steps=short_steps, evaluation_sequences=1),
        )
        return future.result()

    plain = short_training(baseline).measurement
    seconds = None
    if plain.tokens_per_second is not None:
        # Evaluation is a forward pass: about a third of a training step per global batch.
        steps = definition.workload.steps + definition.workload.evaluation_sequences / (
            3 * definition.workload.global_batch
        )
        step_seconds = definition.workload.tokens_per_step / plain.tokens_per_second
        seconds = (plain.startup_seconds or 0.0) + steps * step_seconds
    compile_seconds = short_training(compiled[0]).measurement.compile_seconds if compiled else None
    first = {c.fingerprint: (name, c) for name, c in [("baseline", baseline), *legal.named.items()]}
    return Plan(
        definition=definition,
        legal=legal,
        configurations=len(configurations),
        trials_wanted=_possible_trials(definition, request.trials or DEFAULT_TRIALS),
        first=tuple(first.values()),
        seconds_per_trial=seconds,
        compile_seconds=compile_seconds,
        compiled_share=len(compiled) / len(configurations),
    )
