"""`autotune queue`: the searches of a server."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from autotune.cli import completion
from autotune.cli.options import JsonOption
from autotune.cli.server import NeededServerOption, open_client
from autotune.cli.tables import as_text, is_narrow, make_console
from autotune.errors import InvalidInput, suggestion
from autotune.spec.queued_search import SEARCH_STATES
from autotune.spec.study import counted_trials
from autotune.units import format_duration

if TYPE_CHECKING:
    from autotune.client.searches import RemoteSearch

_MOST = 1000


def queue(
    state: Annotated[
        str | None,
        typer.Option(
            "--state",
            metavar="|".join(SEARCH_STATES),
            autocompletion=completion.one_of(SEARCH_STATES),
            help="List only searches in this state.",
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", help="List at most this many searches.")
    ] = 20,
    server: NeededServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the searches of a server: queued, running and ended.

    Running ones come first, then those in the queue in its order, then ended ones, newest first.
    autotune watch follows one, autotune cancel ends it.
    """
    if state is not None and state not in SEARCH_STATES:
        raise InvalidInput(
            f"Invalid state: {state!r}",
            hint=suggestion(state, SEARCH_STATES, otherwise=f"use {', '.join(SEARCH_STATES)}"),
        )
    if not 1 <= limit <= _MOST:
        raise InvalidInput(
            f"Invalid value of --limit: {limit}", hint=f"give a whole number from 1 to {_MOST}"
        )
    with open_client(server) as client:
        found = client.searches(state=state, limit=limit)
    if as_json:
        print(json.dumps({"searches": [search.answer for search in found]}, indent=2))
        return
    console = make_console()
    if not found:
        kind = "" if state is None else f"{state} "
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
                search.reason or str((search.progress or {}).get("doing", "")),
            ]
        table.add_row(*(as_text(cell) for cell in cells))
    return table


def _state(search: "RemoteSearch") -> str:
    if search.position is not None:
        return f"{search.state}, place {search.position}"
    return search.state


def _trials(search: "RemoteSearch") -> str:
    if search.trials_wanted is None:
        return str(search.trials or "")
    return counted_trials(search.trials or 0, search.trials_wanted)


def _ago(moment: str) -> str:
    """Return how long ago a moment in ISO 8601 was; as it is where it is none."""
    try:
        since = datetime.now(UTC) - datetime.fromisoformat(moment).astimezone(UTC)
    except ValueError:
        return moment
    return f"{format_duration(max(0.0, since.total_seconds()))} ago"
