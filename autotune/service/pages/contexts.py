"""What the pages show, computed from studies, searches and devices: plain values, no HTML.

A search and a device come as the objects of the HTTP interface, so that the page and other programs
see the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from autotune.analysis.pick import PREFERENCES, Preferences
from autotune.exporters import TARGETS
from autotune.reporting.columns import (
    BLANK,
    TrialTable,
    front_records,
    marks_of,
    text_or_blank,
    trial_table,
)
from autotune.reporting.figures import FIGURES
from autotune.reporting.outcomes import outcome_counts, outcome_label, outcome_reason
from autotune.reporting.report.answer import Headline, answer_of
from autotune.reporting.report.excluded import Group, excluded
from autotune.reporting.report.facts import study_facts, workload_facts
from autotune.reporting.study_view import StudyView
from autotune.reporting.trial_facts import (
    Facts,
    RankPeak,
    measured_facts,
    memory_facts,
    rank_peaks,
    technique_facts,
)
from autotune.reporting.trial_text import format_speed, place_and_cap, trial_label
from autotune.service.pages.small_front import SmallFront, small_front
from autotune.spec.result import StudyResult
from autotune.spec.study import MOST_TRIALS_IN_TIME
from autotune.storage.store import StudySummary
from autotune.units import format_duration, format_percent, format_size

STATES: Mapping[str, str] = {
    "queued": "waiting",
    "running": "running",
    "finished": "finished",
    "cancelled": "cancelled",
    "failed": "failed",
}
ACTIVE = ("queued", "running")


def sentence(text: str) -> str:
    """Returns the text of an error with a capital letter and a full stop."""
    if not text:
        return ""
    return text[0].upper() + text[1:] + ("" if text[-1] in ".?!" else ".")


if TYPE_CHECKING:
    from autotune.reporting.figures import comparison

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
        reason=search.get("reason") or "",
        hint=search.get("hint") or "",
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
    """A running search with the picture of its front, where its study has begun."""

    row: SearchRow
    picture: SmallFront | None
    cap: str
    answer: str
    """The pick so far in a few words; empty without one."""


def running_search(search: Mapping[str, Any], result: StudyResult | None) -> RunningSearch:
    """Returns a running search; `result` is that of its study, None before it has begun."""
    if result is None:
        return RunningSearch(row=search_row(search), picture=None, cap="", answer="")
    return RunningSearch(
        row=search_row(search),
        picture=small_front(result),
        cap=format_size(result.cap_bytes),
        answer=_short_answer(result),
    )


def _short_answer(result: StudyResult) -> str:
    if result.pick is None:
        return ""
    pick = result.trial(result.pick.number)
    size = format_size(pick.peak_memory_bytes or 0)
    return f"best so far: #{pick.number}, {size}, {pick.tokens_per_second or 0:,.0f} tokens/s"


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


def device_row(device: Mapping[str, Any]) -> DeviceRow:
    """Returns the texts of a device, which is an object of the HTTP interface."""
    memory, used = device.get("memory_bytes"), device.get("used_bytes")
    busy = device.get("utilization_percent")
    share = None if not memory or used is None else min(1.0, used / memory)
    return DeviceRow(
        name=str(device["name"]),
        description={"cuda": "GPU", "cpu": "processor"}.get(device["type"], device["type"]),
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


@dataclass(frozen=True, kw_only=True)
class FigureCard:
    """A figure that the page draws when a reader comes near it."""

    kind: str
    title: str
    lead: str
    alternative: str
    height: int
    """Pixels that are kept free for it."""
    has_table: bool


FIGURE_CARDS = (
    FigureCard(
        kind="ladder",
        title="What each technique gains",
        lead="Bars to the right of zero are better: less memory, higher speed, lower perplexity.",
        alternative="Bars for each value of a technique: how it changes memory, speed and "
        "perplexity. “The same as a table” below it has the numbers.",
        height=560,
        has_table=True,
    ),
    FigureCard(
        kind="memory",
        title="What holds the memory at the peak",
        lead="The baseline, the pick and the front. To save more memory, reduce the longest "
        "segments of the pick.",
        alternative="Stacked bars of the memory at the peak of the baseline, the pick and the "
        "front, by category. “The same as a table” below it has the numbers.",
        height=520,
        has_table=True,
    ),
    FigureCard(
        kind="history",
        title="How the search went",
        lead="The best values so far, and the hypervolume: the share of a box up to the cap that "
        "the front dominates. Where it no longer grows, more trials would help little.",
        alternative="Lines of the best memory, speed and perplexity so far, and of the "
        "hypervolume, over the trials and over time.",
        height=620,
        has_table=False,
    ),
)
assert all(card.kind in FIGURES for card in FIGURE_CARDS)


@dataclass(frozen=True, kw_only=True)
class StudyPage:
    """Everything on the page of a study but its trials, which have a list of their own."""

    name: str
    about: str
    answer: Headline
    outcomes: str
    front: TrialTable
    picture: SmallFront
    """The front in words and as a small picture, for readers without the large one."""
    preferences: tuple[tuple[str, str], ...]
    """(name, value) of what is not the default, for addresses."""
    prefer: str
    prefer_choices: tuple[str, ...]
    max_perplexity_increase_percent: str
    targets: Mapping[str, str]
    pick: int | None
    settings: Facts
    workload: Facts
    figures: tuple[FigureCard, ...]


def study_page(view: StudyView, preferences: Preferences) -> StudyPage:
    """Returns the page of a study, whose `view` was made with these preferences."""
    result = view.result
    return StudyPage(
        name=result.study,
        about=f"{result.workload.describe()}, {result.workload.steps} steps, "
        f"on {place_and_cap(result)}",
        answer=answer_of(view),
        outcomes=outcome_counts(result.trials),
        front=trial_table(result, front_records(result), with_before_training=True),
        picture=small_front(result),
        preferences=preference_pairs(preferences),
        prefer=preferences.prefer,
        prefer_choices=PREFERENCES,
        max_perplexity_increase_percent=f"{100 * preferences.max_perplexity_increase:g}",
        targets={name: target.title for name, target in TARGETS.items()},
        pick=None if result.pick is None else result.pick.number,
        settings=study_facts(view, preferences),
        workload=workload_facts(result.workload),
        figures=FIGURE_CARDS,
    )


def preference_pairs(preferences: Preferences) -> tuple[tuple[str, str], ...]:
    """Returns the parameters of an address that say these preferences, none for the defaults."""
    default = Preferences()
    pairs: list[tuple[str, str]] = []
    if preferences.prefer != default.prefer:
        pairs.append(("prefer", preferences.prefer))
    increase = preferences.max_perplexity_increase
    if increase != default.max_perplexity_increase:
        pairs.append(("max_perplexity_increase", f"{increase:g}"))
    return tuple(pairs)


def left_out(view: StudyView) -> tuple[Group, ...]:
    """Returns the configurations that are excluded from the front, and why."""
    return excluded(view)


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
        message=outcome_reason(record),
        measured=measured_facts(result, record),
        technique_values=technique_facts(record.config),
        memory=memory_facts(record),
        ranks=rank_peaks(record),
        targets={name: target.title for name, target in TARGETS.items()},
        before=number - 1 if number > 0 else None,
        after=number + 1 if number < len(result.trials) - 1 else None,
        is_running=record.is_running,
    )


# -- comparison ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ComparedStudy:
    name: str
    pick: str
    cap: str
    memory: str
    saved: str
    speed: str
    perplexity: str
    trials: str
    device: str
    workload: str


@dataclass(frozen=True, kw_only=True)
class ComparePage:
    studies: tuple[ComparedStudy, ...]
    sentences: tuple[str, ...]
    """What more devices gain, and what differs."""


def compare_page(views: Sequence[StudyView]) -> ComparePage:
    """Returns the picks of several studies. Raises InvalidInput for fewer than two."""
    # It imports plotly, half a second that the start of the server does without.
    from autotune.reporting.figures import comparison  # noqa: PLC0415

    compared = comparison.compute(views)
    return ComparePage(
        studies=tuple(_compared(side) for side in compared.sides),
        sentences=(*compared.scaling, *compared.differences),
    )


def _compared(side: "comparison.Side") -> ComparedStudy:
    return ComparedStudy(
        name=side.study,
        pick=side.pick_words if side.pick is None else f"#{side.pick} {side.pick_words}",
        cap=format_size(side.cap_bytes),
        memory=text_or_blank(side.peak_memory_bytes, format_size),
        saved=text_or_blank(side.saved_share, partial(_saved_text, side)),
        speed=format_speed(side.tokens_per_second, side.tokens_per_second_spread) or BLANK,
        perplexity=side.perplexity_words or BLANK,
        trials=f"{side.trials:,}",
        device=side.device,
        workload=side.workload,
    )


def _saved_text(side: "comparison.Side", share: float) -> str:
    predicted = " (predicted)" if side.baseline_is_predicted else ""
    return f"{format_percent(share)} % less than the baseline{predicted}"
