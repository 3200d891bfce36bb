"""The study: ask, run, keep, tell. `search` runs one, `result_of` reads one; `plan.py` says what one would do."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import filelock
import optuna

from autotune.definition import StudyDefinition
from autotune.errors import StudyMismatch
from autotune.executors.local import LocalExecutor
from autotune.recommendation.front import pareto_front
from autotune.recommendation.pick import DEFAULT_PREFERENCES, Preferences, choose
from autotune.reporting.study_view import StudyView
from autotune.result import StudyResult, TrialRecord
from autotune.storage import StudyStore
from autotune.storage.database import BUSY_TIMEOUT_SECONDS, sqlite_file
from autotune.study.continuing import (
    check_fresh,
    check_same_device,
    check_same_model,
    check_same_study,
    prepare_again,
)
from autotune.study.earlier import TakenOver, take_over
from autotune.study.events import Listener, StudyOpened
from autotune.study.forecast import Forecaster
from autotune.study.foresight import Foresight
from autotune.study.measuring import Manner
from autotune.study.request import (
    NewStudy,
    SearchRequest,
    check_sampler,
    check_snapshot,
    new_definition,
    space_of,
    work_folder,
)
from autotune.study.sampling import OptunaStudy
from autotune.study.session import StudySession, possible_trials

__all__ = ["SearchRequest", "result_of", "search", "view_of"]


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
        with LocalExecutor(work, should_stop=should_stop) as executor:
            if space is None:
                name, new = request.name or "", None
                check_same_study(request, store.definition(name)[0])
            else:
                new = new_definition(request, space=space, executor=executor, work=work, listener=listener)
                name = new.definition.name
            try:
                with _owned(work, name):
                    opened = _open(store, name, new, request, executor=executor, work=work)
                    _run(opened, request, store, executor, work / name, listener, should_stop)
            finally:
                if new is not None:
                    new.discard()
        return result_of(store, name, request.preferences)
    finally:
        store.close()


@dataclass(frozen=True, kw_only=True)
class _Opened:
    definition: StudyDefinition
    trials_wanted: int
    taken_over: TakenOver | None = None
    """None: continued."""


def _run(
    opened: _Opened,
    request: SearchRequest,
    store: StudyStore,
    executor: LocalExecutor,
    folder: Path,
    listener: Listener,
    should_stop: Callable[[], bool],
) -> None:
    definition = opened.definition
    listener(
        StudyOpened(
            definition=definition,
            legal=definition.legal_space(),
            trials_wanted=opened.trials_wanted,
            records=tuple(store.trials(definition.name)),
            is_new=opened.taken_over is not None,
            taken_over={} if opened.taken_over is None else opened.taken_over.counts,
        )
    )
    is_predictable = request.predict and definition.workload.script is None
    forecaster = Forecaster(executor=executor, workload=definition.workload, device_type=definition.device.type)
    session = StudySession(
        definition,
        store=store,
        optuna_study=_open_optuna(definition, request.storage),
        executor=executor,
        foresight=Foresight(definition, store=store, predict=forecaster.forecast if is_predictable else None),
        study_folder=folder,
        listener=listener,
        should_stop=should_stop,
        manner=Manner(
            time_limit_seconds=request.trial_time_limit_seconds,
            full_trainings=request.full_trainings,
            seeds=request.perplexity_seeds,
            keep_snapshots=request.memory_snapshot,
        ),
        until_converged=request.until_converged,
    )
    budget = request.time_budget_seconds
    session.run(trials_wanted=opened.trials_wanted, deadline=None if budget is None else time.monotonic() + budget)


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


def view_of(store: StudyStore, study: str, preferences: Preferences = DEFAULT_PREFERENCES) -> StudyView:
    """The same with the study's definition and predictions, for figures and reports. Raises UnknownStudy."""
    definition, _ = store.definition(study)
    begun_at, last_result_at = store.dates(study)
    return StudyView(
        definition=definition,
        result=result_of(store, study, preferences),
        forecasts=store.forecasts(study),
        begun_at=begun_at,
        last_result_at=last_result_at,
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


def _open(
    store: StudyStore,
    name: str,
    new: NewStudy | None,
    request: SearchRequest,
    *,
    executor: LocalExecutor,
    work: Path,
) -> _Opened:
    """The study to run and how many trials are wanted of it: created now, or the stored one on today's device.

    Trials that were taken over are more than those asked for.
    """
    if new is not None and not store.has_study(name):
        new.settle(work / name)
        taken = take_over(store, new.definition, request)
        wanted = possible_trials(new.definition, request.new_trials + len(taken.records))
        store.create_study(new.definition, trials_wanted=wanted, records=taken.records, forecasts=taken.forecasts)
        return _Opened(definition=new.definition, trials_wanted=wanted, taken_over=taken)
    stored, stored_wanted = store.definition(name)
    reused = sum(record.reused_from is not None for record in store.trials(name))
    check_fresh(request, stored, reused=reused)
    check_sampler(stored.sampler, until_converged=request.until_converged)
    device, _ = executor.probe(request.device or stored.device.device, {})
    check_same_device(stored, device)
    check_snapshot(request, device)
    check_same_model(stored, executor=executor)
    prepare_again(stored, executor=executor, folder=work / name)
    says_how_many = request.trials or request.until_converged
    wanted = possible_trials(stored, request.new_trials + reused) if says_how_many else stored_wanted
    if wanted != stored_wanted:
        store.set_trials_wanted(name, wanted)
    return _Opened(definition=replace(stored, device=device), trials_wanted=wanted)


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
def _owned(work: Path, study: str) -> Iterator[None]:
    """Holds the study for this process; the lock goes with the process, however it ends."""
    lock = filelock.FileLock(work / f"{study}.lock")
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
    baseline = definition.baseline_config()
    known = ("ok", "over_cap", "predicted_over_cap")
    return next((r for r in records if r.config == baseline and r.outcome in known), None)
