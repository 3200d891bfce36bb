"""The table of trials on the page of a study: found, filtered, sorted and cut into pages.

The server does it, so that a study of ten thousand trials is as quick to open as one of ten. What
a reader asked for is in the address. An address that is wrong shows the default instead of an
error, as it may have been typed or be of an older version.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from autotune.reporting.outcomes import OUTCOME_LABELS, outcome_label, outcome_reason
from autotune.reporting.trial_text import (
    BeforeTraining,
    before_training,
    format_perplexity,
    format_speed,
    perplexity_notes,
    perplexity_remarks,
    trial_label,
)
from autotune.spec.config import FIELD_ORDER
from autotune.spec.result import StudyResult, TrialRecord
from autotune.units import format_duration, format_size

PAGE_SIZE = 25

COLUMNS: Mapping[str, str] = {
    "number": "trial",
    "name": "configuration",
    "peak_memory_bytes": "peak memory",
    "device_bytes": "on device",
    "predicted_peak_memory_bytes": "predicted",
    "tokens_per_second": "tokens/s",
    "perplexity": "perplexity",
    "outcome": "outcome",
    "seconds": "took",
}
"""{field that a table can be sorted by: heading}"""
_TEXTS = ("number", "name", "outcome")
_SHOWN = ("front", "feasible", "running", *OUTCOME_LABELS)


@dataclass(frozen=True, kw_only=True)
class ListedTrials:
    """Which trials a reader wants to see, and in which order."""

    find: str = ""
    """Words that all have to be in what is known of the trial; `#12` is trial 12."""
    show: str = ""
    """front, feasible, running, an outcome, or empty for all."""
    techniques: tuple[str, ...] = ()
    """Choices such as `precision:bf16-mixed`, all of which a trial has."""
    sort: str = "number"
    """A field of `COLUMNS`, with a minus before it for the largest first."""
    page: int = 1

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, str]]) -> "ListedTrials":
        """Returns the query of the parameters of an address, without those that are not valid."""
        given = list(parameters)
        last = dict(given)
        show = last.get("show", "")
        sort = last.get("sort", "number")
        page = last.get("page", "")
        return cls(
            find=last.get("find", "")[:200],
            show=show if show in _SHOWN else "",
            techniques=tuple(
                value for name, value in given if name == "technique" and _is_technique(value)
            ),
            sort=sort if sort.removeprefix("-") in COLUMNS else "number",
            page=int(page) if page.isascii() and page.isdigit() and 0 < len(page) < 8 else 1,
        )

    def address(self, **changes: Any) -> str:
        """Returns the parameters of the query with `changes`, for a link; defaults are left out."""
        changed = replace(self, **changes)
        default = ListedTrials()
        pairs = [
            (name, str(getattr(changed, name)))
            for name in ("find", "show", "sort", "page")
            if getattr(changed, name) != getattr(default, name)
        ]
        pairs += [("technique", choice) for choice in changed.techniques]
        return urlencode(pairs)

    @property
    def field(self) -> str:
        return self.sort.removeprefix("-")

    @property
    def is_descending(self) -> bool:
        return self.sort.startswith("-")


def _is_technique(choice: str) -> bool:
    field, colon, value = choice.partition(":")
    return bool(colon) and bool(value) and field in FIELD_ORDER


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """A line of the table, as text."""

    number: int
    name: str
    words: str
    memory: str
    device: str
    predicted: str
    speed: str
    perplexity: str
    perplexity_remarks: str
    outcome: str
    """Empty for a trial that is ok, which needs no word."""
    message: str
    took: str
    marks: tuple[str, ...]
    is_pick: bool


@dataclass(frozen=True, kw_only=True)
class Heading:
    """A column of the table, with the link that sorts by it."""

    field: str
    title: str
    is_number: bool
    on_phones: bool
    sorted: str
    """ascending, descending, or none for a column that the table is not sorted by."""
    address: str


@dataclass(frozen=True, kw_only=True)
class SelectOption:
    value: str
    title: str
    is_chosen: bool


@dataclass(frozen=True, kw_only=True)
class TrialList:
    """One page of the table and what stands around it."""

    query: ListedTrials
    headings: tuple[Heading, ...]
    rows: tuple[TrialRow, ...]
    found: int
    total: int
    first: int
    """Position of the first row among those found, from 1; 0 without rows."""
    pages: int
    before: str | None
    """Parameters of the page before; None on the first."""
    after: str | None
    outcomes: tuple[SelectOption, ...]
    techniques: tuple[tuple[str, tuple[SelectOption, ...]], ...]
    """The techniques that differ between trials, each with its values."""
    perplexity_notes: tuple[str, ...]
    before_training: BeforeTraining | None
    """What stands before all trials, with pretrained weights; None past the first page."""

    @property
    def last(self) -> int:
        return self.first + len(self.rows) - 1 if self.rows else 0


def trial_list(result: StudyResult, query: ListedTrials) -> TrialList:
    """Returns the page of the table that the query asks for; past the last it is the last."""
    found = _sorted(_found(result, query), query)
    pages = max(1, -(-len(found) // PAGE_SIZE))
    query = replace(query, page=min(query.page, pages))
    begin = (query.page - 1) * PAGE_SIZE
    shown = found[begin : begin + PAGE_SIZE]
    return TrialList(
        query=query,
        headings=tuple(_headings(result, query)),
        rows=tuple(trial_row(result, record) for record in shown),
        found=len(found),
        total=len(result.trials),
        first=begin + 1 if shown else 0,
        pages=pages,
        before=query.address(page=query.page - 1) if query.page > 1 else None,
        after=query.address(page=query.page + 1) if query.page < pages else None,
        outcomes=tuple(_outcome_choices(result, query)),
        techniques=tuple(_technique_choices(result, query)),
        perplexity_notes=tuple(perplexity_notes(shown)),
        before_training=before_training(result) if query.page == 1 else None,
    )


# -- finding ---------------------------------------------------------------------------------------


def _found(result: StudyResult, query: ListedTrials) -> list[TrialRecord]:
    front = set(result.front)
    words = query.find.lower().split()
    choices = [choice.partition(":")[::2] for choice in query.techniques]
    return [
        record
        for record in result.trials
        if _is_shown(record, query.show, front)
        and all(str(getattr(record.config, field)) == value for field, value in choices)
        and _has_words(record, words)
    ]


def _is_shown(record: TrialRecord, show: str, front: set[int]) -> bool:
    if show == "front":
        return record.number in front
    if show == "feasible":
        return record.feasible
    if show == "running":
        return record.is_running
    return not show or (record.outcome == show and not record.is_running)


def _has_words(record: TrialRecord, words: Sequence[str]) -> bool:
    if not words:
        return True
    text = f"{trial_label(record)} {outcome_label(record)} {record.message}".lower()
    return all(word == f"#{record.number}" or word in text for word in words)


# -- sorting ---------------------------------------------------------------------------------------


def _sorted(records: list[TrialRecord], query: ListedTrials) -> list[TrialRecord]:
    """Sort by a field; what was not measured is last in both directions."""
    value_of: Callable[[TrialRecord], Any]
    if query.field == "name":
        value_of = _label_in_lower_case
    elif query.field == "outcome":
        value_of = outcome_label
    else:
        field = query.field

        def value_of(record: TrialRecord) -> Any:
            return getattr(record, field)

    known = [record for record in records if value_of(record) is not None]
    unknown = [record for record in records if value_of(record) is None]
    known.sort(key=value_of, reverse=query.is_descending)
    return known + unknown


def _label_in_lower_case(record: TrialRecord) -> str:
    return trial_label(record).lower()


def _headings(result: StudyResult, query: ListedTrials) -> Iterable[Heading]:
    has_predictions = any(record.predicted_peak_memory_bytes for record in result.trials)
    for field, title in COLUMNS.items():
        if field == "device_bytes" and result.device.type != "cuda":
            continue
        if field == "predicted_peak_memory_bytes" and not has_predictions:
            continue
        is_sorted = field == query.field
        descending = is_sorted and not query.is_descending
        direction = "none"
        if is_sorted:
            direction = "descending" if query.is_descending else "ascending"
        yield Heading(
            field=field,
            title=title,
            is_number=field not in _TEXTS,
            on_phones=field not in ("device_bytes", "predicted_peak_memory_bytes", "seconds"),
            sorted=direction,
            address=query.address(sort=f"-{field}" if descending else field, page=1),
        )


# -- choices ---------------------------------------------------------------------------------------


def _outcome_choices(result: StudyResult, query: ListedTrials) -> Iterable[SelectOption]:
    outcomes = {record.outcome for record in result.trials if not record.is_running}
    titles = {"": "all trials", "front": "the front", "feasible": "under the cap and ok"}
    if any(record.is_running for record in result.trials):
        titles["running"] = "running"
    titles |= {outcome: label for outcome, label in OUTCOME_LABELS.items() if outcome in outcomes}
    for value, title in titles.items():
        yield SelectOption(value=value, title=title, is_chosen=value == query.show)


def _technique_choices(
    result: StudyResult, query: ListedTrials
) -> Iterable[tuple[str, tuple[SelectOption, ...]]]:
    for field in FIELD_ORDER:
        values = {str(getattr(record.config, field)) for record in result.trials}
        if len(values) < 2:
            continue
        choices = []
        for value in sorted(values):
            choice = f"{field}:{value}"
            choices.append(
                SelectOption(value=choice, title=value, is_chosen=choice in query.techniques)
            )
        yield field.replace("_", " "), tuple(choices)


# -- rows ------------------------------------------------------------------------------------------


def trial_row(result: StudyResult, record: TrialRecord) -> TrialRow:
    """Returns one trial as the texts of a line."""
    is_pick = result.pick is not None and record.number == result.pick.number
    marks = []
    if is_pick:
        marks.append("pick")
    if record.number in result.front:
        marks.append("front")
    if record.number == result.baseline:
        marks.append("baseline")
    return TrialRow(
        number=record.number,
        name=record.name or "",
        words=record.config.describe(),
        memory=_size(record.peak_memory_bytes),
        device=_size(record.device_bytes),
        predicted=_size(record.predicted_peak_memory_bytes),
        speed=format_speed(record.tokens_per_second, record.tokens_per_second_spread),
        perplexity=format_perplexity(record),
        perplexity_remarks=perplexity_remarks(result, record),
        outcome="" if record.outcome == "ok" else outcome_label(record),
        message=outcome_reason(record),
        took="" if record.seconds is None else format_duration(record.seconds),
        marks=tuple(marks),
        is_pick=is_pick,
    )


def _size(size_bytes: int | None) -> str:
    return "" if size_bytes is None else format_size(size_bytes)
