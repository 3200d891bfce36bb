"""`autotune queue`: the searches of a server."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

from rich.table import Table

from autotune.cli.options import OnServer, Shown
from autotune.cli.server import open_client
from autotune.cli.tables import as_text, is_narrow, make_console
from autotune.spec.queued_search import SearchState
from autotune.spec.setting import setting, whole_number
from autotune.spec.study import counted_trials
from autotune.units import format_duration

if TYPE_CHECKING:
    from autotune.client.searches import RemoteSearch


@dataclass(frozen=True, kw_only=True)
class QueueCommand(OnServer, Shown):
    """Which searches of a server to list."""

    state: SearchState | None = setting(None, "List only searches in this state.")
    limit: Annotated[int, whole_number(1, 1000)] = setting(
        20, "List at most this many searches.", metavar="N"
    )


def queue(request: QueueCommand) -> None:
    """List the searches of a server: queued, running and ended.

    Running ones come first, then those in the queue in its order, then ended ones, newest first.
    autotune watch follows one, autotune cancel ends it.
    """
    with open_client(request.server) as client:
        found = client.searches(state=request.state, limit=request.limit)
    if request.as_json:
        print(json.dumps({"searches": [search.answer for search in found]}, indent=2))
        return
    console = make_console()
    if not found:
        kind = "" if request.state is None else f"{request.state} "
        console.print(f"no {kind}searches; submit one with: autotune submit")
        return
    console.print(_table(found, narrow=is_narrow(console)))


def _table(searches: "Sequence[RemoteSearch]", *, narrow: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("search", justify="right", no_wrap=True)
    table.add_column("state", overflow="fold")
    table.add_column("study", overflow="fold")
    table.add_column("trials", justify="right", no_wrap=True)
    if not narrow:
        table.add_column("priority", justify="right", no_wrap=True)
        table.add_column("by", overflow="fold")
        table.add_column("submitted", no_wrap=True)
        table.add_column("remark", overflow="fold")
    for search in searches:
        cells = [str(search.id), _state(search), search.study, _trials(search)]
        if not narrow:
            cells += [
                str(search.priority),
                search.submitted_by,
                _ago(search.submitted_at),
                _remark(search),
            ]
        table.add_row(*(as_text(cell) for cell in cells))
    return table


def _state(search: "RemoteSearch") -> str:
    if search.position is not None:
        return f"{search.state}, place {search.position}"
    return search.state


def _remark(search: "RemoteSearch") -> str:
    doing = search.progress.doing if search.progress else ""
    if search.state == "running" and search.machine:
        doing = f"on {search.machine}: {doing}" if doing else f"on {search.machine}"
    return "; ".join(filter(None, (search.reason or doing, search.waiting)))


def _trials(search: "RemoteSearch") -> str:
    if search.trials_wanted is None:
        return str(search.trials or "")
    return counted_trials(search.trials or 0, search.trials_wanted)


def _ago(moment: str) -> str:
    """Returns how long ago a moment in ISO 8601 was; as it is where it is none."""
    try:
        since = datetime.now(UTC) - datetime.fromisoformat(moment).astimezone(UTC)
    except ValueError:
        return moment
    return f"{format_duration(max(0.0, since.total_seconds()))} ago"
