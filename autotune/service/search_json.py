"""A search of the queue as a JSON object of the interface."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from autotune.service.submissions import TRIALS_BEFORE
from autotune.spec.queued_search import QueuedSearch


def moment(seconds: float | None) -> str | None:
    """Returns seconds since 1970 as ISO 8601 in UTC."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, tz=UTC).isoformat(timespec="seconds")


def search_object(search: QueuedSearch, *, position: int | None = None) -> dict[str, Any]:
    """Returns the JSON object; `position` is its place in the queue, from 1."""
    progress: Mapping[str, Any] = search.progress or {}
    return {
        "id": search.id,
        "state": search.state,
        "is_stopping": search.is_stopping,
        "reason": search.reason,
        "hint": search.hint,
        "study": search.study,
        "priority": search.priority,
        "group": search.group,
        "position": position,
        "request": {name: value for name, value in search.request.items() if name != TRIALS_BEFORE},
        "submitted_by": search.submitted_by,
        "submitted_at": moment(search.submitted_at),
        "started_at": moment(search.started_at),
        "ended_at": moment(search.ended_at),
        "exit_code": search.exit_code,
        "starts": search.run,
        "trials": progress.get("trials"),
        "trials_wanted": progress.get("trials_wanted"),
        "progress": _progress(progress) if search.state == "running" and progress else None,
        "version": search.version,
    }


def _progress(progress: Mapping[str, Any]) -> dict[str, Any]:
    names = (
        "doing",
        "places",
        "counts",
        "best",
        "time_left",
        "seconds_left",
        "is_confirming",
        "used_seconds",
    )
    return {name: progress.get(name) for name in names}
