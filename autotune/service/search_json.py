"""A search of the queue as a JSON object of the interface."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from datetime import UTC, datetime
from typing import Any

from autotune.service.processes import machine_of
from autotune.service.submissions import TRIALS_BEFORE
from autotune.spec.queued_search import QueuedSearch, QueuePlace, Search, SearchProgress


def moment(seconds: float | None) -> str | None:
    """Returns seconds since 1970 as ISO 8601 in UTC."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, tz=UTC).isoformat(timespec="seconds")


_OF_PROGRESS = [field.name for field in fields(SearchProgress)]
_OF_PLACE = tuple(field.name for field in fields(QueuePlace))
_MADE = (*_OF_PLACE, "machine", "request", "starts", "trials", "trials_wanted", "progress")
_MOMENTS = ("submitted_at", "started_at", "ended_at")
_IN_NO_QUEUE = QueuePlace()
_AS_STORED = [field.name for field in fields(Search) if field.name not in (*_MADE, *_MOMENTS)]


def search_object(search: QueuedSearch, *, place: QueuePlace | None = None) -> dict[str, Any]:
    """Returns the JSON object of a `Search`; `place` is where it stands in the queue."""
    progress: Mapping[str, Any] = search.progress or {}
    is_told = search.state == "running" and bool(progress)
    return {
        **{name: getattr(search, name) for name in _AS_STORED},
        **{name: moment(getattr(search, name)) for name in _MOMENTS},
        **asdict(place or _IN_NO_QUEUE),
        "request": {name: value for name, value in search.request.items() if name != TRIALS_BEFORE},
        "starts": search.run,
        "machine": machine_of(search.host),
        "trials": progress.get("trials"),
        "trials_wanted": progress.get("trials_wanted"),
        "progress": {name: progress.get(name) for name in _OF_PROGRESS} if is_told else None,
    }
