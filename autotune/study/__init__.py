"""The study: ask, run, keep, tell. `search` runs one, `result_of` reads one; `plan.py` says what one would do."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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
from autotune.study.continuing import check_same_device, check_same_model, check_same_study, prepare_again
from autotune.study.events import Listener, StudyOpened
from autotune.study.forecast import Forecaster
from autotune.study.foresight import Foresight
from autotune.study.measuring import Manner
from autotune.study.request import (
    DEFAULT_TRIALS,
    NewStudy,
    SearchRequest,
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
                    definition, wanted = _open(store, name, new, request, executor=executor, work=work)
                    _run(definition, wanted, request, store, executor, work / name, listener, should_stop)
            finally:
                if new is not None:
                    new.discard()
        return result_of(store, name, request.preferences)
    finally:
        store.close()


def _run(
    definition: StudyDefinition,
    wanted: int,
    request: SearchRequest,
    store: StudyStore,
    executor: LocalExecutor,
    folder: Path,
    listener: Listener,
    should_stop: Callable[[], bool],
) -> None:
    records = tuple(store.trials(definition.name))
    legal = definition.legal_space()
    listener(StudyOpened(definition=definition, legal=legal, trials_wanted=wanted, records=records, is_new=not records))
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
    )
    budget = request.time_budget_seconds
    session.run(trials_wanted=wanted, deadline=None if budget is None else time.monotonic() + budget)


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
) -> tuple[StudyDefinition, int]:
    """The study to run and how many trials are wanted of it: created now, or the stored one on today's device."""
    if new is not None and not store.has_study(name):
        new.settle(work / name)
        wanted = possible_trials(new.definition, request.trials or DEFAULT_TRIALS)
        store.create_study(new.definition, trials_wanted=wanted)
        return new.definition, wanted
    stored, stored_wanted = store.definition(name)
    device, _ = executor.probe(request.device or stored.device.device, {})
    check_same_device(stored, device)
    check_snapshot(request, device)
    check_same_model(stored, executor=executor)
    prepare_again(stored, executor=executor, folder=work / name)
    wanted = possible_trials(stored, request.trials) if request.trials else stored_wanted
    if wanted != stored_wanted:
        store.set_trials_wanted(name, wanted)
    return replace(stored, device=device), wanted


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
