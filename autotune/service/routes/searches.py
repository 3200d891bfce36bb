"""The queue: submit a search, look at it, cancel it, continue it."""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Query, Response
from fastapi import Path as PathParameter
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse

from autotune.errors import InvalidInput, NotAllowed, NotYours
from autotune.service.problems import documented
from autotune.service.request_body import body_of
from autotune.service.search_json import search_object
from autotune.service.state import Caller, CallerOfRequest, Service, ServiceState
from autotune.service.submissions import (
    ACCEPTED,
    TRIALS_BEFORE,
    CheckedSubmission,
    check_new_name,
    check_submission,
)
from autotune.service.trial_logs import log_of_search
from autotune.spec.queued_search import MOST_PRIORITY, QueuedSearch, Search, SearchState
from autotune.storage.searches import NewSearch
from autotune.study.opening.resume import check_same_study
from autotune.study.opening.staging import staged
from autotune.study.submission import Submission

router = APIRouter(prefix="/searches", tags=["searches"])

SUBMISSION_BODY = body_of(
    Submission,
    ACCEPTED,
    description="The settings of `autotune.search`, and those of the queue.",
    examples={
        "a quick search": {
            "value": {"space": "quick", "max_mem": "48MiB", "trials": 16, "name": "first"}
        },
        "a larger model": {
            "value": {
                "max_mem": "8GiB",
                "layers": 24,
                "width": 1024,
                "heads": 16,
                "time_budget": "1h",
                "priority": 5,
            }
        },
    },
)
LARGEST_ID = 2**31 - 1
_LONGEST_KEY = 200
LARGEST_LOG_BYTES = 256 * 1024

SearchNumber = Annotated[
    int, PathParameter(ge=1, le=LARGEST_ID, description="Number of the search.")
]


IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        max_length=_LONGEST_KEY,
        description="A submission that is repeated with the same key is made once.",
    ),
]


class SearchList(BaseModel):
    """Searches, and how many there are without limit and offset."""

    searches: list[Search]
    total: int


class PriorityChange(BaseModel):
    """What may be changed of a search."""

    model_config = ConfigDict(extra="forbid")

    priority: int = Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY, strict=True)


class Continuation(BaseModel):
    """How far a study goes on; empty: until it has the trials that were wanted."""

    model_config = ConfigDict(extra="forbid")

    trials: int | None = Field(
        default=None, ge=1, le=1_000_000, description="More trials.", strict=True
    )
    time_budget: float | str | None = Field(default=None, description="Such as 30m, or seconds.")
    name: str | None = Field(
        default=None,
        min_length=1,
        max_length=100,
        description="Name of a study of the caller's own, which takes over the results: for the "
        "search of somebody else.",
    )
    priority: int = Field(default=0, ge=-MOST_PRIORITY, le=MOST_PRIORITY, strict=True)


@router.post(
    "",
    status_code=202,
    response_model=Search,
    summary="Submit a search",
    openapi_extra=SUBMISSION_BODY,
    responses={
        200: {"model": Search, "description": "The key was used before, for this search."},
        **documented(409, 422, 503),
    },
)
def submit(
    service: Service,
    caller: CallerOfRequest,
    response: Response,
    body: Annotated[dict[str, Any], Body()],
    key: IdempotencyKey = None,
) -> Mapping[str, Any]:
    """Puts a search into the queue.

    Takes the settings of `autotune.search`; the server decides where it runs. Code, and files
    outside of the folders that the server was given, are not accepted.
    """
    checked = _checked(service, body)
    _check_priority(caller, checked.priority)
    search, is_new = service.searches.submit(
        NewSearch(
            request=checked.settings,
            submitted_by=caller.name,
            is_of_admin=caller.is_admin,
            study=checked.name,
            study_base=checked.base,
            priority=checked.priority,
            group=checked.group,
            key=_key_of(caller, key),
            digest=checked.digest,
            budget_seconds=checked.budget_seconds,
        ),
        most_of_person=service.settings.most_queued_of_person,
    )
    if is_new:
        service.tokens.record_action(
            who=caller.name, action="submit search", target=str(search.id), detail=search.study
        )
        service.worker.wake()
    else:
        response.status_code = 200
    response.headers["Location"] = f"/api/v1/searches/{search.id}"
    return _answer(service, search)


def _checked(
    service: ServiceState, body: Mapping[str, Any], *, trials_before: int = 0
) -> CheckedSubmission:
    name, definition, model = body.get("name"), None, ""
    if isinstance(name, str):
        check_new_name(name)
        if service.store.has_study(name):
            definition, _ = service.store.definition(name)
            model = definition.device.name
    with staged(service.work_folder) as folder:
        checked = check_submission(
            body,
            service.rules(body, model=model),
            folder=folder,
            trials_before=trials_before,
        )
        if definition is not None:
            check_same_study(checked.request, definition)
    return checked


def _check_may_change(service: ServiceState, caller: Caller, number: int) -> None:
    """Raises UnknownSearch, and NotYours for a search of somebody else."""
    owner = service.searches.get(number).submitted_by
    caller.check_may_change(f"search {number}", owner=owner)


def _check_priority(caller: Caller, priority: int) -> None:
    """Raises NotAllowed for who would overtake others without being an admin."""
    if priority > 0 and not caller.is_admin:
        raise NotAllowed(
            f"a priority above 0, such as {priority}, is for admins",
            hint="use 0, or ask an admin to move the search forwards",
        )


def _key_of(caller: Caller, key: str | None) -> str | None:
    """Returns the key as it is stored: that of one caller is none of another."""
    if key is None:
        return None
    if not key.isascii() or not key.isprintable() or not key.strip():
        raise InvalidInput(
            f"Invalid Idempotency-Key: {key!r}", hint="use letters and digits, such as a UUID"
        )
    return f"{caller.name}:{key}"


@router.get("", response_model=SearchList, summary="The queue", responses=documented(422, 503))
def searches(
    service: Service,
    state: Annotated[
        list[SearchState] | None, Query(description="Only searches in one of these states.")
    ] = None,
    study: Annotated[str | None, Query(max_length=100, description="Only of this study.")] = None,
    by: Annotated[
        str | None, Query(max_length=100, description="Only those that this person submitted.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0, le=LARGEST_ID)] = 0,
) -> Mapping[str, Any]:
    """Running searches first, then the queue in its order, then what has ended, latest first."""
    if "\0" in f"{study}{by}":
        return {"searches": [], "total": 0}
    places = service.searches.places()
    found, total = service.searches.find(
        states=state or (), study=study, by=by, limit=limit, offset=offset, order=places
    )
    return {
        "searches": [search_object(search, place=places.get(search.id)) for search in found],
        "total": total,
    }


@router.get(
    "/{number}", response_model=Search, summary="One search", responses=documented(404, 422, 503)
)
def search(service: Service, number: SearchNumber) -> Mapping[str, Any]:
    """What was asked for, and what has become of it."""
    return _answer(service, service.searches.get(number))


@router.patch(
    "/{number}",
    response_model=Search,
    summary="Change its priority",
    responses=documented(404, 409, 422, 503),
)
def change(
    service: Service, caller: CallerOfRequest, number: SearchNumber, wanted: PriorityChange
) -> Mapping[str, Any]:
    """Moves a search forwards or backwards in the queue."""
    _check_may_change(service, caller, number)
    _check_priority(caller, wanted.priority)
    found = service.searches.set_priority(number, wanted.priority)
    service.tokens.record_action(
        who=caller.name,
        action="change priority",
        target=str(number),
        detail=str(wanted.priority),
    )
    return _answer(service, found)


@router.post(
    "/{number}/cancel",
    status_code=202,
    response_model=Search,
    summary="Cancel a search",
    responses=documented(404, 409, 422, 503),
)
def cancel(service: Service, caller: CallerOfRequest, number: SearchNumber) -> Mapping[str, Any]:
    """Ends a search: in the queue at once, a running one within seconds.

    Its results stay, and it can be continued.
    """
    _check_may_change(service, caller, number)
    found = service.searches.cancel(number, by=caller.name)
    service.tokens.record_action(
        who=caller.name, action="cancel search", target=str(number), detail=found.study
    )
    service.worker.wake()
    return _answer(service, found)


@router.post(
    "/{number}/continue",
    status_code=202,
    response_model=Search,
    summary="Continue a study",
    responses={
        200: {"model": Search, "description": "The key was used before, for this search."},
        **documented(404, 409, 422, 503),
    },
)
def continue_search(
    service: Service,
    caller: CallerOfRequest,
    number: SearchNumber,
    response: Response,
    wanted: Annotated[Continuation | None, Body()] = None,
    key: IdempotencyKey = None,
) -> Mapping[str, Any]:
    """Puts a new search of the same study into the queue, for more trials or more time.

    It is of the study's owner, also where an admin asks for it. With another name it is a new study
    of the caller, which takes over what was measured.
    """
    wanted = wanted or Continuation()
    before = service.searches.get(number)
    study = wanted.name or before.study
    of_name = before.submitted_by if study == before.study else caller.name
    owner = service.searches.owner_of(study) or of_name
    if not caller.may_change(owner):
        raise NotYours(
            f"study {study} belongs to {owner}",
            hint="give a name of your own: the new study takes over what was measured",
        )
    _check_priority(caller, wanted.priority)
    settings = {**before.request, "name": study, "priority": wanted.priority}
    settings.pop("time_budget", None)
    settings.pop(TRIALS_BEFORE, None)
    if wanted.time_budget is not None:
        settings["time_budget"] = wanted.time_budget
    trials, trials_before = _trials_of_continuation(service, before, study, more=wanted.trials)
    if trials is not None:
        settings["trials"] = trials
    checked = _checked(service, settings, trials_before=trials_before)
    digest = json.dumps([number, wanted.model_dump()], sort_keys=True)
    found, is_new = service.searches.submit(
        NewSearch(
            request={**checked.settings, TRIALS_BEFORE: trials_before},
            submitted_by=owner,
            is_of_admin=caller.is_admin,
            study=study,
            priority=checked.priority,
            group=checked.group,
            key=_key_of(caller, key),
            digest=hashlib.sha256(digest.encode()).hexdigest(),
            budget_seconds=checked.budget_seconds,
        ),
        only_of_study=True,
        most_of_person=service.settings.most_queued_of_person,
    )
    if is_new:
        service.tokens.record_action(
            who=caller.name, action="continue search", target=str(number), detail=str(found.id)
        )
        service.worker.wake()
    else:
        response.status_code = 200
    response.headers["Location"] = f"/api/v1/searches/{found.id}"
    return _answer(service, found)


def _trials_of_continuation(
    service: ServiceState, before: QueuedSearch, study: str, *, more: int | None
) -> tuple[int | None, int]:
    """Returns how many trials the study is to have, and how many it has, without reused ones."""
    if not service.store.has_study(study):
        return more or before.request.get("trials"), 0
    records = service.store.trials(study)
    reused = sum(record.reused_from is not None for record in records)
    finished = sum(record.is_finished for record in records) - reused
    if more is None:
        return service.store.definition(study)[1] - reused, finished
    return finished + more, finished


@router.delete(
    "/{number}",
    status_code=204,
    response_class=Response,
    summary="Remove a search from the list",
    responses=documented(404, 409, 422, 503),
)
def remove(service: Service, caller: CallerOfRequest, number: SearchNumber) -> None:
    """Only one that has ended. Its study stays."""
    _check_may_change(service, caller, number)
    study = service.searches.get(number).study
    service.searches.remove(number)
    service.tokens.record_action(
        who=caller.name, action="remove search", target=str(number), detail=study
    )


@router.get(
    "/{number}/log",
    response_class=PlainTextResponse,
    summary="What the process of a search has printed",
    responses=documented(404, 422, 503),
)
def log(
    service: Service,
    caller: CallerOfRequest,
    number: SearchNumber,
    largest_bytes: Annotated[
        int, Query(alias="bytes", ge=1, le=LARGEST_LOG_BYTES, description="How much of its end.")
    ] = 64 * 1024,
) -> PlainTextResponse:
    """The end of the log, whichever server has it; empty where the search has not begun."""
    found = log_of_search(service, caller, number, most_bytes=largest_bytes)
    return PlainTextResponse("") if found is None else found.response()


def _answer(service: ServiceState, search: QueuedSearch) -> Mapping[str, Any]:
    places = service.searches.places() if search.state == "queued" else {}
    return search_object(search, place=places.get(search.id))
