"""How a search gets to its study: the one that is there, checked, or a new one, made by one process at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import filelock

from autotune.errors import StudyMismatch
from autotune.execution.local import LocalExecutor
from autotune.execution.server_tasks import POLL_SECONDS
from autotune.failpoints import failpoint
from autotune.spec.study import StudyDefinition
from autotune.storage.database import SHORT_BUSY_TIMEOUT_SECONDS, sqlite_file
from autotune.storage.error_translation import storage_errors
from autotune.storage.store import StudyStore
from autotune.study.request import NewStudy, SearchRequest, check_snapshot, check_trials_per_device
from autotune.study.resume import (
    check_fresh,
    check_same_device,
    check_same_model,
    check_same_study,
    prepare_again,
)
from autotune.study.reuse import ReusedResults, reuse
from autotune.study.staging import sweep
from autotune.study.workers.retry import DatabaseRetry


@dataclass(frozen=True, kw_only=True)
class OpenedStudy:
    definition: StudyDefinition
    trials_wanted: int
    reused: ReusedResults | None = None
    """None: continued."""


def stored_study(request: SearchRequest) -> StudyDefinition | None:
    """The study that is to be continued.

    Raises StorageUnavailable for a database that is none of ours.
    """
    file = sqlite_file(request.storage)
    with storage_errors(request.storage):
        if file is not None and not file.exists():
            return None
    with opened_store(request.storage) as store:
        names = store.names()
        return store.definition(request.name)[0] if request.name in names else None


@contextmanager
def opened_store(storage: str, retry: DatabaseRetry | None = None) -> Iterator[StudyStore]:
    """`retry`: the database has been reached before, and is waited for."""
    file = sqlite_file(storage)
    was_reached = retry is not None and (file is None or file.exists())

    def opened() -> StudyStore:
        busy = SHORT_BUSY_TIMEOUT_SECONDS
        return StudyStore(storage, create=True, was_reached=was_reached, busy_timeout_seconds=busy)

    store = opened() if retry is None else retry(opened)
    try:
        yield store
    finally:
        store.close()


def open_study(
    store: StudyStore,
    name: str,
    new: NewStudy | None,
    request: SearchRequest,
    *,
    executor: LocalExecutor,
    work: Path,
    retry: DatabaseRetry,
) -> OpenedStudy:
    """The study to run and how many trials are wanted of it: created now, or the stored one on today's device.

    Trials that were taken over are more than those asked for.
    """
    sweep(work)
    if new is not None and not retry(lambda: store.has_study(name)):
        created = _create(store, new, request, folder=work / name, retry=retry)
        if created is not None:
            return created
    stored, stored_wanted = retry(lambda: store.definition(name))
    check_same_study(request, stored)
    reused = sum(record.reused_from is not None for record in retry(lambda: store.trials(name)))
    check_fresh(request, stored, reused=reused)
    device, _ = executor.probe(request.device or stored.device.device, {})
    check_same_device(stored, device)
    check_snapshot(request.memory_snapshot, device.device)
    check_trials_per_device(request.trials_per_device, device)
    check_same_model(stored, executor=executor)
    prepare_again(stored, executor=executor, folder=work / name)
    says_how_many = request.trials or request.until_converged
    wanted = stored.possible_trials(request.new_trials + reused) if says_how_many else stored_wanted
    if wanted != stored_wanted:
        retry(lambda: store.set_trials_wanted(name, wanted))
    return OpenedStudy(definition=replace(stored, device=device), trials_wanted=wanted)


def _create(
    store: StudyStore, new: NewStudy, request: SearchRequest, *, folder: Path, retry: DatabaseRetry
) -> OpenedStudy | None:
    """None where another process, perhaps on another machine, has created it just now."""
    new.settle(folder)
    failpoint("files settled")
    taken = retry(lambda: reuse(store, new.definition, request))
    wanted = new.definition.possible_trials(request.new_trials + len(taken.records))
    try:
        retry(
            lambda: store.create_study(
                new.definition,
                trials_wanted=wanted,
                records=taken.records,
                forecasts=taken.forecasts,
            )
        )
    except StudyMismatch:
        return None
    failpoint("study created")
    return OpenedStudy(definition=new.definition, trials_wanted=wanted, reused=taken)


@contextmanager
def alone(file: Path, check_stop: Callable[[], None]) -> Iterator[None]:
    """Lets one process of this machine at a time begin or join the study; the lock goes with the process."""
    lock = filelock.FileLock(file)
    while True:
        try:
            lock.acquire(timeout=POLL_SECONDS)
            break
        except filelock.Timeout:
            check_stop()
    try:
        yield
    finally:
        lock.release()
