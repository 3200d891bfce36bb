"""Profiles of trials, which a search takes at its end: lists them, and sends their files."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Path
from pydantic import BaseModel, Field
from starlette.responses import FileResponse, Response

from autotune.analysis.pick import Preferences
from autotune.reporting.profile_files import (
    SNAPSHOT_FILE,
    TRACE_FILE,
    TrialProfile,
    profile_of,
    profiles_of,
)
from autotune.service.parameters import WITHOUT_NUL, StudyName, TrialNumber
from autotune.service.problems import Problem, documented
from autotune.service.reading import HTML, REPORT_POLICY
from autotune.service.state import Caller, CallerOfRequest, Service, ServiceState
from autotune.service.trial_logs import machines_of
from autotune.spec.result import StudyResult

router = APIRouter(prefix="/studies/{name}", tags=["profiles"])

_MEDIA_TYPES: Mapping[str, str] = {
    ".html": HTML,
    ".json": "application/json",
    ".gz": "application/gzip",
    ".py": "text/plain; charset=utf-8",
}
_ANY = "application/octet-stream"
_SAVED = (TRACE_FILE, SNAPSHOT_FILE)
"""Files that no browser shows."""


class ProfileFileEntry(BaseModel):
    """A file of a profile."""

    name: str
    bytes: int
    use: str = Field(description="What it shows.")
    opened_by: str = Field(description="The page that opens it; empty where a browser does.")
    path: str = Field(description="Where this server has it.")


class ProfileEntry(BaseModel):
    """The profile of a trial: a run of its own, which no number of the trial is of."""

    trial: int
    steps: int = Field(description="How many steps were profiled.")
    taken_at: str = Field(description="ISO 8601 in UTC.")
    bytes: int = Field(description="Of all files.")
    files: list[ProfileFileEntry]


class Profiles(BaseModel):
    """The profiles of a study, of every server that can be reached."""

    study: str
    profiles: list[ProfileEntry]
    bytes: int = Field(description="Of all profiles.")


@router.get(
    "/profiles",
    response_model=Profiles,
    summary="The profiles of a study",
    responses=documented(404, 422),
)
def list_profiles(service: Service, caller: CallerOfRequest, name: StudyName) -> Mapping[str, Any]:
    """Every trial that was profiled, with its files."""
    found = profiles_of(_result(service, name))
    entries = {profile.trial: _entry(service, name, profile) for profile in found}
    if not caller.is_server:
        for answer in service.others.answers(f"/api/v1/studies/{name}/profiles"):
            entries = {entry["trial"]: entry for entry in answer.json()["profiles"]} | entries
    return {
        "study": name,
        "profiles": [entries[trial] for trial in sorted(entries)],
        "bytes": sum(entry["bytes"] for entry in entries.values()),
    }


@router.get(
    "/trials/{number}/profile",
    response_model=ProfileEntry,
    summary="The profile of a trial",
    responses=documented(404, 422),
)
def show_profile(
    service: Service, caller: CallerOfRequest, name: StudyName, number: TrialNumber
) -> Mapping[str, Any]:
    """Its files, and where to download them."""
    return profile_entry(service, caller, name, number)


@router.get(
    "/trials/{number}/profile/{file:path}",
    response_class=FileResponse,
    summary="A file of a profile",
    responses={
        200: {
            "description": "The file. A page is shown in a sandbox.",
            "content": {kind: {} for kind in sorted({*_MEDIA_TYPES.values(), _ANY, "text/plain"})},
        },
        **documented(404, 422),
    },
)
def download(
    service: Service,
    caller: CallerOfRequest,
    name: StudyName,
    number: TrialNumber,
    file: Annotated[
        str,
        Path(
            max_length=200,
            pattern=WITHOUT_NUL,
            description="The name of a file, as the profile has it.",
            examples=[TRACE_FILE, "code/graph-0.py"],
        ),
    ],
) -> Response:
    try:
        profile = _profile(service, name, number)
    except _NotHere as missing:
        entry = profile_entry(service, caller, name, number)
        # No other name is passed on: it could lead to another address of that server.
        if all(one["name"] != file for one in entry["files"]):
            raise _no_file(entry, name, file) from None
        response = service.others.file(f"{_address(name, number)}/{quote(file)}")
        if response is None:
            raise _missing(service, caller, name, missing) from None
        return response
    path = profile.file(file)
    if path is None:
        raise _no_file(_entry(service, name, profile), name, file)
    media_type = _MEDIA_TYPES.get(path.suffix, _ANY)
    headers = {"Cache-Control": "private, no-cache"}
    if media_type == HTML:
        headers["Content-Security-Policy"] = REPORT_POLICY
    disposition = "attachment" if path.name in _SAVED or media_type == _ANY else "inline"
    return FileResponse(
        path,
        media_type=media_type,
        headers=headers,
        filename=f"{name}-{number}-{file.replace('/', '-')}",
        content_disposition_type=disposition,
    )


def _result(service: ServiceState, name: str) -> StudyResult:
    return service.reader.view_in_thread(name, Preferences()).result


def _check_trial(result: StudyResult, number: int) -> None:
    """Raise Problem where the study has no such trial."""
    if all(record.number != number for record in result.trials):
        raise Problem(404, f"study {result.study!r} has no trial {number}")


def _no_file(entry: Mapping[str, Any], name: str, file: str) -> Problem:
    return Problem(
        404,
        f"the profile of trial {entry['trial']} of study {name!r} has no file {file!r:.80}",
        hint=f"see {_address(name, entry['trial'])} for its files",
    )


def _address(study: str, trial: int) -> str:
    return f"/api/v1/studies/{study}/trials/{trial}/profile"


class _NotHere(Problem):
    """This server has no profile of a trial."""


def profile_entry(service: ServiceState, caller: Caller, name: str, number: int) -> dict[str, Any]:
    """Returns the JSON object of a trial's profile, whichever server has it.

    Raises UnknownStudy, and Problem where it cannot be had.
    """
    try:
        return _entry(service, name, _profile(service, name, number))
    except _NotHere as missing:
        answers = []
        if not caller.is_server:
            answers = service.others.answers(_address(name, number))
        if not answers:
            raise _missing(service, caller, name, missing) from None
        found: dict[str, Any] = answers[0].json()
        return found


def _missing(service: ServiceState, caller: Caller, name: str, missing: Problem) -> Problem:
    if caller.is_server:
        return missing
    what = f"a profile of this trial of study {name!r}"
    return service.others.problem(missing, what, machines_of(service, name))


def _profile(service: ServiceState, name: str, number: int) -> TrialProfile:
    """Returns the profile of a trial.

    Raises UnknownStudy, Problem for an unknown trial, and _NotHere where there is none here.
    """
    result = _result(service, name)
    _check_trial(result, number)
    profile = profile_of(result, number)
    if profile is None:
        raise _NotHere(
            404,
            f"there is no profile of trial {number} of study {name!r} on this machine",
            hint="submit a search of this study with profile, for its pick or its front",
        )
    return profile


def _entry(service: ServiceState, study: str, profile: TrialProfile) -> dict[str, Any]:
    """Returns the JSON object of a profile."""
    taken = datetime.fromtimestamp(profile.taken_at, tz=UTC)
    address = service.settings.root_path + _address(study, profile.trial)
    return {
        "trial": profile.trial,
        "steps": profile.steps,
        "taken_at": taken.isoformat(timespec="seconds"),
        "bytes": profile.size_bytes,
        "files": [
            {
                "name": file.name,
                "bytes": file.size_bytes,
                "use": file.use,
                "opened_by": file.opened_by,
                "path": f"{address}/{quote(file.name)}",
            }
            for file in profile.files
        ],
    }
