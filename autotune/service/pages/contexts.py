"""What the pages show, computed from studies, searches and devices: plain values, no HTML.

A search and a device come as the objects of the HTTP interface, so that the page and other programs
see the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.analysis.pick import Preferences
from autotune.exporters import TARGETS
from autotune.reporting.columns import marks_of
from autotune.reporting.outcomes import outcome_label, outcome_reason
from autotune.reporting.trial_facts import (
    Facts,
    RankPeak,
    measured_facts,
    memory_facts,
    rank_peaks,
    technique_facts,
)
from autotune.reporting.trial_text import trial_label
from autotune.service.pages.field_names import LABELS, in_fields
from autotune.spec.queued_search import waiting_text
from autotune.spec.result import StudyResult
from autotune.spec.study import MOST_TRIALS_IN_TIME
from autotune.storage.store import StudySummary
from autotune.units import format_duration, format_size

STATES: Mapping[str, str] = {
    "queued": "waiting",
    "running": "running",
    "finished": "finished",
    "cancelled": "cancelled",
    "failed": "failed",
}
ACTIVE = ("queued", "running")


def sentence(text: str, *, here: Mapping[str, str] = LABELS) -> str:
    """Returns the text of an error with a capital letter, a full stop and the names of fields.

    `here` are those of the page.
    """
    if not text:
        return ""
    text = in_fields(text, here=here)
    return text[0].upper() + text[1:] + ("" if text[-1] in ".?!" else ".")


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page of what a database has."""

    rows: Sequence[Any]
    page: int
    pages: int
    total: int


# -- searches --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DeviceActivity:
    """What a search does on one of its devices."""

    name: str
    """Empty where the search has only one."""
    trial: int | None
    label: str
    """The trial, or what is measured again."""
    doing: str


@dataclass(frozen=True, kw_only=True)
class SearchRow:
    """A search as texts."""

    id: int
    title: str
    """The name of its study, or its number while it has none."""
    study: str
    state: str
    state_text: str
    about: str
    """What was asked for: cap, model and search space."""
    position: int | None
    waiting: str
    """What it waits for and when it begins."""
    priority: int
    submitted_by: str
    submitted_at: str
    ended_at: str
    trials: str
    doing: str
    """What it does before its study is open."""
    best: str
    seconds_left: float | None
    time_left: str
    places: tuple[DeviceActivity, ...]
    is_stopping: bool
    reason: str
    hint: str
    machine: str
    """Which runs it, or ran it last."""
    version: str
    is_active: bool


def search_row(search: Mapping[str, Any]) -> SearchRow:
    """Returns the texts of a search, which is an object of the HTTP interface."""
    progress = search.get("progress") or {}
    seconds_left = progress.get("seconds_left")
    is_stopping = bool(search.get("is_stopping"))
    study = search.get("study") or ""
    request = search.get("request") or {}
    return SearchRow(
        id=search["id"],
        title=study or f"search {search['id']}",
        study=study,
        state=search["state"],
        state_text="stopping" if is_stopping else STATES[search["state"]],
        about=_request_text(request),
        position=search.get("position"),
        waiting=waiting_text(search.get("waits_for") or "", search.get("begins_in_seconds")),
        priority=search.get("priority") or 0,
        submitted_by=search.get("submitted_by") or "",
        submitted_at=moment_text(search.get("submitted_at")),
        ended_at=moment_text(search.get("ended_at")),
        trials=_trials_text(search.get("trials"), search.get("trials_wanted")),
        doing=progress.get("doing") or "",
        best=progress.get("best") or "",
        seconds_left=seconds_left,
        time_left="" if seconds_left is None else f"about {format_duration(seconds_left)} left",
        places=tuple(_places(progress.get("places") or ())),
        is_stopping=is_stopping,
        reason=in_fields(search.get("reason") or ""),
        hint=in_fields(search.get("hint") or ""),
        machine=search.get("machine") or "",
        version=search.get("version") or "",
        is_active=search["state"] in ACTIVE,
    )


def _places(places: Iterable[Mapping[str, Any]]) -> Iterable[DeviceActivity]:
    for place in places:
        yield DeviceActivity(
            name=place.get("name") or "",
            trial=place.get("trial"),
            label=place.get("label") or "",
            doing=place.get("doing") or "",
        )


def _request_text(request: Mapping[str, Any]) -> str:
    """Returns the main settings of a submission in one line: `48MiB, space quick, 8 trials`."""
    parts = []
    cap = request.get("max_mem")
    if cap is not None:
        parts.append(format_size(cap) if isinstance(cap, int) else str(cap))
    for name in ("model", "script", "space", "dataset"):
        if request.get(name):
            parts.append(f"{name} {request[name]}")
    if request.get("trials"):
        parts.append(f"{request['trials']} trials")
    if request.get("time_budget"):
        parts.append(f"time {request['time_budget']}")
    return ", ".join(parts)


def _trials_text(trials: int | None, wanted: int | None) -> str:
    if wanted and wanted < MOST_TRIALS_IN_TIME:
        return f"{trials or 0:,} of {wanted:,} trials"
    return "1 trial" if trials == 1 else f"{trials or 0:,} trials"


def moment_text(moment: str | None) -> str:
    """Returns `2026-03-04 05:06` of a moment in ISO 8601, in UTC; empty for none."""
    return "" if not moment else moment[:16].replace("T", " ")


@dataclass(frozen=True, kw_only=True)
class RunningSearch:
    """A running search, and what it has found."""

    row: SearchRow
    has_study: bool
    answer: str
    """The pick so far in a few words; empty without one."""


def running_search(search: Mapping[str, Any], result: StudyResult | None) -> RunningSearch:
    """Returns a running search; `result` is that of its study, None before it has begun."""
    return RunningSearch(
        row=search_row(search),
        has_study=result is not None,
        answer="" if result is None else _short_answer(result),
    )


def _short_answer(result: StudyResult) -> str:
    if result.pick is None:
        return ""
    pick = result.trial(result.pick.number)
    size, cap = format_size(pick.peak_memory_bytes or 0), format_size(result.cap_bytes)
    speed = f"{pick.tokens_per_second or 0:,.0f} {pick.terms.speed}"
    return (
        f"best so far: #{pick.number}, {size} of {cap}, {speed}; {len(result.front)} on the front"
    )


# -- devices ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """A device and its memory in use, as texts."""

    name: str
    description: str
    memory: str
    used: str
    used_percent: int | None
    """None where it is not known."""
    busy: str
    """How busy its processors are; empty where that is not known."""
    others: tuple[str, ...]
    """Processes of others that use it, a text each."""


_KINDS = {"cuda": "GPU", "cpu": "processor"}


def device_row(device: Mapping[str, Any]) -> DeviceRow:
    """Returns the texts of a device, which is an object of the HTTP interface."""
    memory, used = device.get("memory_bytes"), device.get("used_bytes")
    busy = device.get("utilization_percent")
    share = None if not memory or used is None else min(1.0, used / memory)
    return DeviceRow(
        name=str(device["name"]),
        description=f"{_KINDS.get(device['type'], device['type'])} of {device['machine']}",
        memory="" if memory is None else format_size(memory),
        used="" if used is None else format_size(used),
        used_percent=None if share is None else round(100 * share),
        busy="" if busy is None else f"{busy:.0f} % busy",
        others=tuple(_other_text(other) for other in device.get("others") or ()),
    )


def _other_text(other: Mapping[str, Any]) -> str:
    user = f" of {other['user']}" if other.get("user") else ""
    size = "" if other.get("bytes") is None else f": {format_size(other['bytes'])}"
    return f"process {other['pid']}{user}{size}"


# -- list of studies -------------------------------------------------------------------------------

STUDY_COLUMNS: Mapping[str, str] = {"name": "study", "trials": "trials", "created": "begun (UTC)"}
STUDIES_PER_PAGE = 25
DEFAULT_SORT = "-created"


@dataclass(frozen=True, kw_only=True)
class StudyRow:
    name: str
    trials: str
    begun: str
    state: str
    state_text: str


@dataclass(frozen=True, kw_only=True)
class StudyHeading:
    field: str
    title: str
    sorted: str
    sort: str
    """The sorting that a click leads to."""


@dataclass(frozen=True, kw_only=True)
class StudyList:
    """One page of the studies that were searched for."""

    query: str
    sort: str
    page: int
    pages: int
    rows: tuple[StudyRow, ...]
    headings: tuple[StudyHeading, ...]
    found: int
    total: int


def study_list(
    studies: Sequence[StudySummary],
    states: Mapping[str, str],
    *,
    query: str = "",
    sort: str = DEFAULT_SORT,
    page: int = 1,
) -> StudyList:
    """Returns the studies whose name has the words of `query`; `states` are of their searches."""
    field = sort.removeprefix("-")
    if field not in STUDY_COLUMNS:
        sort, field = DEFAULT_SORT, "created"
    words = query.lower().split()
    found = [study for study in studies if all(word in study.name.lower() for word in words)]
    keys = {"name": _name_of, "trials": _trials_of, "created": _begun_of}
    found.sort(key=keys[field], reverse=sort.startswith("-"))
    pages = max(1, -(-len(found) // STUDIES_PER_PAGE))
    page = max(1, min(page, pages))
    begin = (page - 1) * STUDIES_PER_PAGE
    headings = []
    for name, title in STUDY_COLUMNS.items():
        direction = "none"
        if name == field:
            direction = "descending" if sort.startswith("-") else "ascending"
        following = f"-{name}" if direction == "ascending" else name
        headings.append(StudyHeading(field=name, title=title, sorted=direction, sort=following))
    return StudyList(
        query=query,
        sort=sort,
        page=page,
        pages=pages,
        rows=tuple(
            StudyRow(
                name=study.name,
                trials=_trials_text(study.trials, study.trials_wanted),
                begun=study.created_at,
                state=states.get(study.name, ""),
                state_text=STATES.get(states.get(study.name, ""), ""),
            )
            for study in found[begin : begin + STUDIES_PER_PAGE]
        ),
        headings=tuple(headings),
        found=len(found),
        total=len(studies),
    )


def _name_of(study: StudySummary) -> tuple[str, str]:
    return study.name.lower(), study.name


def _trials_of(study: StudySummary) -> tuple[int, str]:
    return study.trials, study.name


def _begun_of(study: StudySummary) -> tuple[str, str]:
    return study.created_at, study.name


# -- one study -------------------------------------------------------------------------------------


def preference_pairs(preferences: Preferences) -> tuple[tuple[str, str], ...]:
    """Returns the parameters of an address that say these preferences, none for the defaults."""
    default = Preferences().parameters()
    return tuple(
        (name, str(value))
        for name, value in preferences.parameters().items()
        if value != default[name]
    )


# -- one trial -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrialPage:
    """Everything that is known of one trial."""

    study: str
    number: int
    title: str
    marks: tuple[str, ...]
    """pick, front, baseline, and how often it was confirmed."""
    outcome: str
    message: str
    measured: Facts
    technique_values: Facts
    memory: Facts
    ranks: tuple[RankPeak, ...]
    """Empty where a trial had one device."""
    targets: Mapping[str, str]
    before: int | None
    after: int | None
    is_running: bool


def trial_page(result: StudyResult, number: int) -> TrialPage:
    """Returns the page of a trial. Raises InvalidInput if the study has none of that number."""
    record = result.trial(number)
    return TrialPage(
        study=result.study,
        number=number,
        title=trial_label(record),
        marks=marks_of(result, record),
        outcome=outcome_label(record),
        message=in_fields(outcome_reason(record)),
        measured=measured_facts(result, record),
        technique_values=technique_facts(record.config),
        memory=memory_facts(record),
        ranks=rank_peaks(record),
        targets={name: target.title for name, target in TARGETS.items()},
        before=number - 1 if number > 0 else None,
        after=number + 1 if number < len(result.trials) - 1 else None,
        is_running=record.is_running,
    )
