"""Rename and delete studies."""

import hashlib
import logging
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi import Path as PathParameter
from pydantic import BaseModel, ConfigDict, Field

from autotune.errors import InvalidInput, SearchConflict
from autotune.service.problems import Problem, documented
from autotune.service.processes import machine_of, this_host
from autotune.service.state import Caller, CallerOfRequest, Service, ServiceState
from autotune.service.submissions import NOT_OF_STUDIES, check_new_name
from autotune.spec.queued_search import ServiceEvent
from autotune.spec.study import check_study_name
from autotune.storage.searches import Searches
from autotune.storage.store import StudyStore
from autotune.storage.tokens import OWNER
from autotune.storage.transfer import read_studies, write_file
from autotune.system.files import durable_file

_LOG = logging.getLogger("autotune.service")

router = APIRouter(prefix="/studies", tags=["studies"])

StudyName = Annotated[
    str, PathParameter(min_length=1, max_length=100, description="Name of the study.")
]


class NewName(BaseModel):
    """What a study is to be called."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=100)


class Renamed(BaseModel):
    """A study under its new name."""

    name: str


class Deleted(BaseModel):
    """A study that is gone, and where it was saved before."""

    name: str
    exported_to: str = Field(
        description="The file on the server; `autotune studies import` reads it."
    )
    machine: str = Field(description="The machine with that file.")
    trials: int


@router.patch(
    "/{name}",
    response_model=Renamed,
    summary="Rename a study",
    responses=documented(404, 409, 422, 503),
)
def rename(
    service: Service, caller: CallerOfRequest, name: StudyName, wanted: NewName
) -> Mapping[str, Any]:
    """Gives a study another name, with its searches and its files."""
    check_new_name(wanted.name)
    _check_may_change(service, caller, name)
    _check_idle(service, name)
    service.searches.rename_study(name, wanted.name)
    _rename_files(service.work_folder, name, wanted.name)
    service.tokens.record_action(
        who=caller.name, action="rename study", target=name, detail=wanted.name
    )
    return {"name": wanted.name}


@router.delete(
    "/{name}",
    response_model=Deleted,
    summary="Delete a study",
    responses=documented(404, 409, 422, 503),
)
def delete(
    service: Service,
    caller: CallerOfRequest,
    name: StudyName,
    confirm: Annotated[
        str | None,
        Query(max_length=100, description="What the first answer to this request gives."),
    ] = None,
) -> Mapping[str, Any]:
    """Deletes a study, after it was exported to a file of the server. Is asked twice.

    The first answer, 409, says what will be gone and gives the value of `confirm` for the second.
    """
    _check_may_change(service, caller, name)
    _check_idle(service, name)
    definition, _ = service.store.definition(name)
    trials = service.store.trials(name)
    # The code confirms the deletion of the study as it is now.
    state = f"{name} {service.store.begun(name)} {len(trials)}"
    code = hashlib.sha256(state.encode()).hexdigest()[:12]
    if confirm != code:
        finished = sum(record.is_finished for record in trials)
        raise Problem(
            409,
            f"study {name} has {finished} trials, which will be gone with its predictions, "
            "confirmations, logs and profiles",
            hint=f"repeat the request with ?confirm={code}; the study is saved to a file before",
            kind="confirmation-needed",
            extra={
                "confirm": code,
                "will_be_deleted": {
                    "study": name,
                    "trials": len(trials),
                    "confirmations": len(service.store.confirmations(name)),
                    "workload": definition.workload.describe(),
                },
            },
        )
    folder = service.deleted_folder
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.db"
    with durable_file(file) as unfinished, unfinished.open("wb") as written:
        write_file(read_studies(service.store.database, [name]), written)
    service.searches.delete_study(name)
    _remove_files(service.work_folder, name)
    # The log is for everybody, who need not know where the server has its files.
    service.tokens.record_action(
        who=caller.name, action="delete study", target=name, detail=file.name
    )
    return {
        "name": name,
        "exported_to": str(file),
        "machine": machine_of(this_host()),
        "trials": len(trials),
    }


def follow_change(
    work_folder: Path, store: StudyStore, searches: Searches, event: ServiceEvent
) -> None:
    """Renames or removes the files here of a study that another server has renamed or deleted.

    A new study of that name keeps its own.
    """
    try:
        check_study_name(event.study)
        searches.check_no_active_search(event.study)
        if store.has_study(event.study):
            return
        if event.data.get("action") == "deleted":
            _remove_files(work_folder, event.study)
        elif event.data.get("action") == "renamed":
            new_name = str(event.data.get("name"))
            check_study_name(new_name)
            _rename_files(work_folder, event.study, new_name)
    except InvalidInput:
        return  # a search has the name now, or the event was forged


def _rename_files(folder: Path, name: str, new_name: str) -> None:
    if name in NOT_OF_STUDIES:
        return
    try:
        (folder / name).rename(folder / new_name)
    except FileNotFoundError:
        pass  # it was not searched here
    except OSError as error:
        _LOG.warning("the files of study %s stay under that name: %s", name, error)


def _remove_files(folder: Path, name: str) -> None:
    if name not in NOT_OF_STUDIES:
        shutil.rmtree(folder / name, ignore_errors=True)


def _check_may_change(service: ServiceState, caller: Caller, name: str) -> None:
    """Raises UnknownStudy, and NotYours for a study of somebody else."""
    service.store.definition(name)
    caller.check_may_change(f"study {name}", owner=service.searches.owner_of(name) or OWNER)


def _check_idle(service: ServiceState, name: str) -> None:
    """Raises SearchConflict while something works on the study."""
    service.searches.check_no_active_search(name)
    running = [
        attempt for attempt in service.store.attempts.running(name) if not attempt.is_expired
    ]
    if running:
        raise SearchConflict(
            f"a search works on study {name}: trial {running[0].number} is running",
            hint="wait until it ends, or stop it",
        )
