"""Studies as they are stored: trials, front, figures, report, exports and logs. Changes nothing."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import anyio.to_thread
from fastapi import APIRouter, Path, Query, Request
from starlette.responses import PlainTextResponse, Response

from autotune.analysis.pick import chosen_trial
from autotune.errors import InvalidInput
from autotune.exporters import TARGETS
from autotune.exporters.written import composed_export, target_of
from autotune.reporting.figures import FIGURES, FigureOptions, figure_kind
from autotune.reporting.figures.axes import AxisName
from autotune.service import schemas
from autotune.service.answers import Answer, json_answer
from autotune.service.export_files import ZIP, as_texts, zipped
from autotune.service.parameters import (
    LARGEST_NUMBER,
    WITHOUT_NUL,
    Limit,
    Offset,
    PreferencesOfRequest,
    StudyName,
    TrialNumber,
)
from autotune.service.problems import Problem, documented
from autotune.service.state import CallerOfRequest, Service
from autotune.service.study_data import StudyData
from autotune.service.trial_logs import log_of_trial
from autotune.service.trial_query import TrialQuery
from autotune.spec.result import Outcome
from autotune.spec.study import check_study_name
from autotune.storage.store import StudyEntry
from autotune.storage.tokens import OWNER

router = APIRouter(tags=["studies"])

_LARGEST_LOG_BYTES = 256 * 1024
_MOST_COMPARED = 8

_NOT_MODIFIED: dict[int | str, dict[str, Any]] = {
    304: {"description": "The client has the same body already, as If-None-Match says."}
}
_OF_STUDY = {**documented(404, 422), **_NOT_MODIFIED}


StudySort = Literal["name", "-name", "created", "-created", "trials", "-trials"]

OptionalTrial = Annotated[
    int | None,
    Query(ge=0, le=LARGEST_NUMBER, description="The number of a trial; by default the pick."),
]


# -- studies ---------------------------------------------------------------------------------------


@router.get(
    "/studies",
    response_model=schemas.Studies,
    summary="The list of studies",
    responses={**documented(422), **_NOT_MODIFIED},
)
async def list_studies(
    request: Request,
    service: Service,
    query: Annotated[
        str, Query(max_length=100, pattern=WITHOUT_NUL, description="A part of the name.")
    ] = "",
    sort: Annotated[StudySort, Query(description="With a `-` the largest first.")] = "-created",
    limit: Limit = 100,
    offset: Offset = 0,
) -> Response:
    entries, trials = await service.reader.entries()
    wanted = [entry for entry in entries if query.lower() in entry.name.lower()]
    ordered = _sorted(wanted, sort, trials)[offset : offset + limit]
    states = await service.states_of_studies()
    owners = await anyio.to_thread.run_sync(service.searches.owners)
    content = {
        "studies": [
            {**_entry(entry, trials, states), "owner": owners.get(entry.name, OWNER)}
            for entry in ordered
        ],
        "total": len(wanted),
    }
    return json_answer(content).response(request)


def _sorted(
    entries: Sequence[StudyEntry], sort: StudySort, trials: Mapping[int, int]
) -> list[StudyEntry]:
    """Sorts studies, those that are equal by their age."""

    def value(entry: StudyEntry) -> Any:
        if sort.endswith("name"):
            return entry.name.lower()
        if sort.endswith("trials"):
            return trials.get(entry.version.study_id, 0)
        return entry.version.study_id

    return sorted(entries, key=value, reverse=sort.startswith("-"))


def _entry(
    entry: StudyEntry, trials: Mapping[int, int], states: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "name": entry.name,
        "created_at": entry.created_at.isoformat(),
        "trials": trials.get(entry.version.study_id, 0),
        "trials_wanted": entry.version.trials_wanted,
        "state": states.get(entry.name),
        "cap_bytes": entry.cap_bytes,
        "device": entry.device,
    }


@router.get(
    "/studies/{name}",
    response_model=schemas.Study,
    summary="A study with its trials, front and pick",
    responses=_OF_STUDY,
)
async def show_study(
    request: Request, service: Service, name: StudyName, preferences: PreferencesOfRequest
) -> Response:
    """The JSON object that `autotune show --json` prints."""
    return (await service.reader.shown(name, preferences)).response(request)


@router.get(
    "/studies/{name}/front",
    response_model=schemas.Front,
    summary="The front and the pick under preferences",
    responses=_OF_STUDY,
)
async def show_front(
    request: Request, service: Service, name: StudyName, preferences: PreferencesOfRequest
) -> Response:
    result = (await service.reader.view(name, preferences)).result

    def compute(data: StudyData) -> Answer:
        return Answer(
            data.trials_json(
                [number for number in result.front if number in data.places],
                study=name,
                preferences=preferences.parameters(),
                front=list(result.front),
                pick=None if result.pick is None else result.pick.number,
                pick_reason=None if result.pick is None else result.pick.reason,
                baseline=result.baseline,
            )
        )

    answer = await service.reader.answer(name, ("front", preferences), compute)
    return answer.response(request)


# -- trials ----------------------------------------------------------------------------------------


@router.get(
    "/studies/{name}/trials",
    response_model=schemas.Trials,
    summary="The trials of a study, filtered, sorted and by pages",
    responses=_OF_STUDY,
)
async def list_trials(
    request: Request,
    service: Service,
    name: StudyName,
    preferences: PreferencesOfRequest,
    outcome: Annotated[list[Outcome], Query(description="Any of these.")] = [],  # noqa: B006
    feasible: bool | None = None,
    front: Annotated[
        bool | None, Query(description="Only trials on the front, or only others.")
    ] = None,
    technique: Annotated[
        list[Annotated[str, Query(max_length=200, pattern=WITHOUT_NUL)]],
        Query(
            max_length=50,
            description="A choice such as `precision:bf16-mixed`. Several of one technique mean "
            "any of them.",
            examples=[["precision:bf16-mixed", "checkpointing:block"]],
        ),
    ] = [],  # noqa: B006
    sort: Annotated[
        str,
        Query(
            max_length=60,
            pattern=WITHOUT_NUL,
            description="A field of a trial or a technique; with a `-` the largest first. What was "
            "not measured is last.",
            examples=["-tokens_per_second"],
        ),
    ] = "number",
    limit: Limit = 100,
    offset: Offset = 0,
) -> Response:
    query = TrialQuery(
        outcomes=tuple(outcome),
        feasible=feasible,
        front=front,
        techniques=tuple(technique),
        sort=sort,
    )
    on_front: tuple[int, ...] = ()
    if front is not None:
        on_front = (await service.reader.view(name, preferences)).result.front

    data, numbers = await service.reader.order(name, query, on_front)
    page = data.trials_json(numbers[offset : offset + limit], total=len(numbers))
    return Answer(page).response(request)


@router.get(
    "/studies/{name}/trials/{number}",
    response_model=schemas.Trial,
    summary="One trial",
    responses=_OF_STUDY,
)
async def show_trial(
    request: Request, service: Service, name: StudyName, number: TrialNumber
) -> Response:
    data = await service.reader.data(name)
    _check_trial(data, number)
    return Answer(data.lines[data.places[number]]).response(request)


@router.get(
    "/studies/{name}/trials/{number}/log",
    response_class=PlainTextResponse,
    summary="The end of a trial's log",
    responses=documented(404, 422),
)
async def show_log(
    service: Service,
    caller: CallerOfRequest,
    name: StudyName,
    number: TrialNumber,
    most_bytes: Annotated[
        int, Query(alias="bytes", ge=1, le=_LARGEST_LOG_BYTES, description="At most so many.")
    ] = _LARGEST_LOG_BYTES,
) -> PlainTextResponse:
    """The end of the log, whichever server has it."""
    data = await service.reader.data(name)
    _check_trial(data, number)
    read = partial(log_of_trial, service, caller, name, number, most_bytes=most_bytes)
    return (await anyio.to_thread.run_sync(read)).response()


def _check_trial(data: StudyData, number: int) -> None:
    """Raises Problem where the study has no such trial."""
    if number in data.places:
        return
    study = data.records.definition.name
    last = len(data.records.trials) - 1
    known = f"its trials are 0 to {last}" if last >= 0 else "it has none yet"
    raise Problem(404, f"study {study!r} has no trial {number}", hint=known)


# -- figures and report ----------------------------------------------------------------------------


@router.get(
    "/studies/{name}/figures/{kind}",
    response_model=schemas.Figure,
    summary="A figure of a study for plotly.js",
    responses=_OF_STUDY,
)
async def show_figure(
    request: Request,
    service: Service,
    name: StudyName,
    kind: Annotated[
        str, Path(max_length=40, json_schema_extra={"enum": list(FIGURES)}, examples=["pareto"])
    ],
    preferences: PreferencesOfRequest,
    x: Annotated[AxisName | None, Query(description="pareto: the quantity of the x axis.")] = None,
    y: Annotated[AxisName | None, Query(description="pareto: the quantity of the y axis.")] = None,
    three_d: Annotated[bool, Query(description="pareto: all three objectives in 3D.")] = False,
    feasible: Annotated[bool, Query(description="parallel: feasible trials only.")] = False,
    trials: Annotated[
        str | None,
        Query(
            max_length=1000,
            pattern=r"^[0-9]{1,9}(,[0-9]{1,9})*$",
            description="memory: numbers of trials.",
            examples=["0,4,7"],
        ),
    ] = None,
    trial: Annotated[
        int | None,
        Query(ge=0, le=LARGEST_NUMBER, description="timeline: the number of a trial."),
    ] = None,
) -> Response:
    try:
        figure_kind(kind)
    except InvalidInput as error:
        raise Problem(404, error.message, hint=error.hint) from None
    numbers = None if trials is None else tuple(dict.fromkeys(map(int, trials.split(","))))
    options = FigureOptions(
        x=x, y=y, three_d=three_d, feasible=feasible, trials=numbers, trial=trial
    )
    answer = await service.reader.figure(name, kind, options, preferences)
    return answer.response(request)


@router.get(
    "/studies/{name}/report",
    summary="The page of `autotune report`",
    responses={
        200: {
            "description": "A page that opens offline. It is shown in a sandbox.",
            "content": {"text/html": {"schema": {"type": "string"}}},
        },
        **_OF_STUDY,
    },
    response_class=Response,
)
async def show_report(
    request: Request,
    service: Service,
    name: StudyName,
    preferences: PreferencesOfRequest,
    download: Annotated[bool, Query(description="As a file to keep.")] = False,
) -> Response:
    answer = await service.reader.report(name, preferences)
    response = answer.response(request)
    if download:
        response.headers["Content-Disposition"] = f'attachment; filename="{name}-report.html"'
    return response


@router.get(
    "/compare",
    response_model=schemas.Figure,
    summary="The fronts of several studies in one figure",
    responses=_OF_STUDY,
)
async def compare(
    request: Request,
    service: Service,
    preferences: PreferencesOfRequest,
    study: Annotated[
        list[Annotated[str, Query(max_length=100, pattern=WITHOUT_NUL)]],
        Query(
            min_length=2,
            max_length=_MOST_COMPARED,
            description="Names of studies.",
            examples=[["quick", "quick-8GiB"]],
        ),
    ],
) -> Response:
    for name in study:
        check_study_name(name)
    return (await service.reader.compared(study, preferences)).response(request)


# -- exports ---------------------------------------------------------------------------------------


@router.get(
    "/studies/{name}/exports",
    response_model=list[schemas.ExportTarget],
    summary="The trainers that a trial can be exported to",
    responses=_OF_STUDY,
)
async def list_exports(request: Request, service: Service, name: StudyName) -> Response:
    await service.reader.version(name)
    content = [
        {"target": target, "title": entry.title, "versions": list(entry.versions)}
        for target, entry in TARGETS.items()
    ]
    return json_answer(content).response(request)


@router.get(
    "/studies/{name}/exports/{target}",
    summary="A trial as the files of another trainer",
    responses={
        200: {
            "description": "A zip file, or with `Accept: application/json` the texts of the files.",
            "content": {
                ZIP: {"schema": {"type": "string", "format": "binary"}},
                "application/json": {"schema": {"$ref": "#/components/schemas/ExportTexts"}},
            },
        },
        **_OF_STUDY,
    },
    response_class=Response,
)
async def export(
    request: Request,
    service: Service,
    name: StudyName,
    target: Annotated[
        str, Path(max_length=40, json_schema_extra={"enum": list(TARGETS)}, examples=["pytorch"])
    ],
    preferences: PreferencesOfRequest,
    trial: OptionalTrial = None,
    version: Annotated[
        str | None,
        Query(
            max_length=40,
            pattern=WITHOUT_NUL,
            description="The version of the trainer; by default the first supported one.",
        ),
    ] = None,
    strict: Annotated[
        bool, Query(description="Fail unless the trainer can express all of the configuration.")
    ] = False,
) -> Response:
    try:
        target_of(target)
    except InvalidInput as error:
        raise Problem(404, error.message, hint=error.hint) from None
    is_json = "application/json" in request.headers.get("accept", "")
    result = (await service.reader.view(name, preferences)).result

    def compute(_: StudyData) -> Answer:
        written = composed_export(
            result,
            chosen_trial(result, trial),
            target,
            target_version=version,
            strict=strict,
        )
        return as_texts(written, result) if is_json else zipped(written)

    what = ("export", preferences, target, trial, version, strict, is_json)
    return (await service.reader.answer(name, what, compute)).response(request)
