"""A search that was handed to a service: what was asked for, and what has become of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from autotune.spec.limits import Count, Moment, Number, Seconds
from autotune.spec.schema import Schema
from autotune.units import format_duration

SearchState = Literal["queued", "running", "finished", "cancelled", "failed"]
SEARCH_STATES: tuple[SearchState, ...] = get_args(SearchState)
ENDED: tuple[SearchState, ...] = ("finished", "cancelled", "failed")

SEARCH_LEASE_SECONDS = 20.0
"""For how long a search without a sign of life counts as running on another machine."""
SEARCH_RENEWAL_SECONDS = 2.0
MOST_LOSSES = 3
"""A search whose process ended without a word more often than this, one after the other, fails."""
MOST_PRIORITY = 100
WORKER_STOPPED = "its worker was stopped; the next one goes on with it"
"""Why a search is queued again."""


@dataclass(frozen=True, kw_only=True)
class QueuePlace:
    """Where a search stands in the queue; without values: it has left the queue."""

    position: int | None = None
    """From 1, in the order in which the searches will begin."""
    waits_for: str = ""
    """The end of a sentence."""
    begins_in_seconds: float | None = None
    """None: unknown."""


def waiting_text(waits_for: str, begins_in_seconds: float | None) -> str:
    """Returns what a search waits for and when it begins; empty where it does not wait."""
    if not waits_for:
        return ""
    if begins_in_seconds == 0.0:
        return "begins now"
    if begins_in_seconds is None:
        return f"waits for {waits_for}; when it begins is not known"
    return f"waits for {waits_for}; begins in about {format_duration(begins_in_seconds)}"


@dataclass(frozen=True, kw_only=True)
class SearchProcess(Schema):
    """The process that runs a search. A pid is used again; with its start it is one process."""

    host: str
    pid: Number
    started_at: Moment
    """Seconds since its machine was started; since 1970 where that is not known."""


@dataclass(frozen=True, kw_only=True)
class QueuedSearch(Schema):
    """One search of the queue; moments are seconds since 1970 by the clock of the database."""

    id: Number
    study: str
    state: SearchState
    request: Mapping[str, Any]
    """The settings as they were submitted, by their names in Python."""
    priority: int
    """From -MOST_PRIORITY to MOST_PRIORITY; the highest first, among equals the oldest."""
    group: str
    """The group of devices that it runs on, or wants; empty: any."""
    submitted_by: str
    submitted_at: Moment
    not_before: Moment = 0.0
    """When its next process may be started."""
    budget_seconds: Seconds | None = None
    """The longest that it runs; None: unknown."""
    started_at: Moment | None = None
    ended_at: Moment | None = None
    reason: str = ""
    """Why it failed or was cancelled, in a sentence without its full stop."""
    hint: str = ""
    exit_code: int | None = None
    """That of `autotune search`; None while it has not ended."""
    run: Number = 0
    """How often a process was started for it. What an earlier one writes does not count."""
    losses: Number = 0
    """How many processes in a row ended without a word."""
    is_stopping: bool = False
    """Whether it is to be cancelled; its process ends within seconds."""
    host: str = ""
    """The machine of the worker that has taken it, or had it last."""
    process: SearchProcess | None = None
    lease_until: Moment = 0.0
    """Until when its process needs no other sign of life."""
    is_expired: bool = False
    """Whether its process has given no sign of life for SEARCH_LEASE_SECONDS."""
    progress: Mapping[str, Any] | None = None
    """What its process last said of itself."""
    version: str = ""
    """Of the autotune that runs it."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more happens to it."""
        return self.state in ENDED


@dataclass(frozen=True, kw_only=True)
class SearchEnd:
    """How the process of a search ended; `queued` where another one is to go on with it."""

    state: SearchState
    reason: str = ""
    hint: str = ""
    exit_code: int | None = None
    is_loss: bool = False
    """Whether it counts as one of the losses in a row after which a search fails."""


@dataclass(frozen=True, kw_only=True)
class SearchProgress(Schema):
    """What a running search does; null where that is not known."""

    doing: str | None = None
    places: tuple[Mapping[str, Any], ...] | None = None
    """What goes on at each device: name, trial, label, doing, seconds."""
    counts: str | None = None
    best: str | None = None
    time_left: str | None = None
    seconds_left: float | None = None
    is_confirming: bool | None = None
    used_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Search(Schema):
    """A search of the queue, as a server answers it: moments are texts, in ISO 8601 and UTC."""

    id: Number
    state: SearchState
    is_stopping: bool = False
    """Whether it is being cancelled."""
    reason: str = ""
    """Why it failed, was cancelled or waits; else empty."""
    hint: str = ""
    study: str = ""
    """Name of its study, which may not have begun yet."""
    priority: int = 0
    group: str = ""
    """The group of devices; empty: any."""
    position: int | None = None
    """Its place in the queue, from 1; null once it has left the queue."""
    waits_for: str = ""
    """What it waits for in the queue, as the end of a sentence."""
    begins_in_seconds: float | None = None
    """An estimate, from the time budgets of the searches before it; null where unknown."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """The settings as submitted."""
    submitted_by: str = ""
    submitted_at: str = ""
    started_at: str | None = None
    ended_at: str | None = None
    exit_code: int | None = None
    """That of `autotune search`."""
    starts: int = 0
    """How often a process was started for it."""
    trials: int | None = None
    """Number of trials with a result."""
    trials_wanted: int | None = None
    progress: SearchProgress | None = None
    machine: str = ""
    """The machine that runs it, or ran it last."""
    version: str = ""
    """Of the autotune that runs it."""

    @property
    def waiting(self) -> str:
        """What it waits for and when it begins; empty once it has left the queue."""
        return waiting_text(self.waits_for, self.begins_in_seconds)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more happens to it."""
        return self.state in ENDED


@dataclass(frozen=True, kw_only=True)
class ServiceEvent:
    """Something that happened to a search; numbers grow in the order of the commits."""

    number: Count
    search: Number
    study: str
    kind: str
    data: Mapping[str, Any]
    at: Moment
    """Seconds since 1970 by the clock of the database."""
