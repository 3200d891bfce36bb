"""Opens the study of a search: resumes the stored one after checks, or creates a new one."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.errors import StudyMismatch
from autotune.execution.flow import POLL_SECONDS
from autotune.execution.local import LocalExecutor
from autotune.spec.study import StudyDefinition
from autotune.storage.database import SHORT_BUSY_TIMEOUT_SECONDS, sqlite_file
from autotune.storage.error_translation import storage_errors
from autotune.storage.retry import RetryPolicy
from autotune.storage.store import StudyStore
from autotune.study.opening.new_study import NewStudy
from autotune.study.opening.resume import (
    check_fresh,
    check_same_device,
    check_same_model,
    check_same_seeds,
    check_same_study,
    prepare_again,
)
from autotune.study.opening.reuse import ReusedResults, reuse
from autotune.study.opening.staging import sweep
from autotune.study.opening.trusted_code import check_trusted, names_code, trust
from autotune.study.request import SearchRequest, check_snapshot, check_trials_per_device
from autotune.system.failpoints import failpoint
from autotune.system.files import hold_lock


@dataclass(frozen=True, kw_only=True)
class OpenedStudy:
    """A study ready to run."""

    definition: StudyDefinition
    trials_wanted: int
    """Number of trials to reach, including those reused from earlier studies."""
    reused: ReusedResults | None = None
    """What a new study reuses; None for a resumed study."""
    perplexity_seeds: int | None = None
    """With how many seeds the trials of a resumed study were trained; None: there are none."""


def stored_study(
    request: SearchRequest, retry: RetryPolicy, *, was_reached: bool
) -> StudyDefinition | None:
    """Returns the definition of the stored study that the request resumes; None if it is new.

    Raises StorageUnavailable for a database that is not a studies database, or that cannot be
    reached; StorageUnreachable for one that this process has reached before.
    """
    file = sqlite_file(request.storage)
    with storage_errors(request.storage):
        if file is not None and not file.exists():
            return None
    with closing(_open_store(request.storage, retry, was_reached=was_reached)) as store:
        names = store.names()
        return store.definition(request.name)[0] if request.name in names else None


@contextmanager
def opened_store(storage: str, retry: RetryPolicy) -> Iterator[StudyStore]:
    """Open the studies database after `stored_study`, and create it if there is none.

    A database that is there has been reached before, so wait for it while it is unreachable.
    """
    file = sqlite_file(storage)
    was_reached = file is None or file.exists()
    with closing(_open_store(storage, retry, was_reached=was_reached)) as store:
        yield store


def _open_store(storage: str, retry: RetryPolicy, *, was_reached: bool) -> StudyStore:
    return StudyStore(
        storage,
        create=True,
        was_reached=was_reached,
        busy_timeout_seconds=SHORT_BUSY_TIMEOUT_SECONDS,
        retry=retry,
    )


def open_study(
    store: StudyStore,
    name: str,
    new: NewStudy | None,
    request: SearchRequest,
    *,
    executor: LocalExecutor,
    work: Path,
) -> OpenedStudy:
    """Create the study, or check that the stored one can be resumed on this device.

    Raises StudyMismatch for a stored study that was made with other options or elsewhere, and
    InvalidInput for one whose code was not named on this machine.
    """
    sweep(work)
    if new is not None and not store.has_study(name):
        created = _create(store, new, request, folder=work / name)
        if created is not None:
            return created
    stored, stored_wanted = store.definition(name)
    check_same_study(request, stored)
    if names_code(request.specified_workload(), stored.workload):
        trust(stored.workload, folder=work / name)
    else:
        check_trusted(stored.workload, study=name, storage=store.url, folder=work / name)
    records = store.trials(name)
    seeds = check_same_seeds(request, stored, records)
    reused = sum(record.reused_from is not None for record in records)
    check_fresh(request, stored, reused=reused)
    device, _ = executor.probe(request.device or stored.device.device, {})
    check_same_device(stored, device)
    executor.use_devices_from(
        device,
        count=stored.workload.devices_per_trial,
        nodes=stored.workload.nodes_per_trial,
    )
    check_snapshot(request.memory_snapshot, device.device)
    check_trials_per_device(request.trials_per_device, device)
    check_same_model(stored, executor=executor)
    prepare_again(stored, executor=executor, folder=work / name)
    wanted = stored_wanted
    if request.trials or request.until_converged or request.ends_by_time:
        asked = request.new_trials(stored.device.type) + reused
        wanted = stored.possible_trials(asked)
    if wanted != stored_wanted:
        store.set_trials_wanted(name, wanted)
    return OpenedStudy(
        definition=replace(stored, device=device), trials_wanted=wanted, perplexity_seeds=seeds
    )


def _create(
    store: StudyStore, new: NewStudy, request: SearchRequest, *, folder: Path
) -> OpenedStudy | None:
    """Create the study; return None if it is there already.

    Another process, on any machine, was faster, or the reply to this one's commit was lost.
    """
    new.settle(folder)
    trust(new.definition.workload, folder=folder)  # its code was named by this request
    failpoint("files settled")
    reused = reuse(store, new.definition, request)
    asked = request.new_trials(new.definition.device.type) + len(reused.records)
    wanted = new.definition.possible_trials(asked)
    try:
        store.create_study(
            new.definition,
            trials_wanted=wanted,
            records=reused.records,
            forecasts=reused.forecasts,
            confirmations=reused.confirmations,
        )
    except StudyMismatch:
        return None
    failpoint("study created")
    return OpenedStudy(definition=new.definition, trials_wanted=wanted, reused=reused)


@contextmanager
def opening_lock(file: Path, check_stop: Callable[[], None]) -> Iterator[None]:
    """Hold the file's lock, so that one process of this machine at a time opens the study.

    The lock is released when the process ends, however it ends.
    """

    def pause() -> None:
        check_stop()
        time.sleep(POLL_SECONDS)

    with hold_lock(file, pause):
        yield
