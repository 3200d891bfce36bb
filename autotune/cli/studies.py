"""`autotune studies`: list the studies of a database, or check, export, import or trust them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer
from rich.table import Table
from rich.text import Text

from autotune import api
from autotune.cli.database import open_store
from autotune.cli.lazy import LazyCommand, LazyGroup
from autotune.cli.options import INSTEAD_OF_STORAGE, InStorage
from autotune.cli.requests import takes_request
from autotune.cli.server import check_one_place, open_client
from autotune.cli.tables import as_text, is_narrow, make_console
from autotune.errors import AutotuneError, InvalidInput, StorageUnavailable, StorageUnreachable
from autotune.reporting.trial_text import short_label, trial_label
from autotune.spec.setting import RESULTS, setting
from autotune.spec.study import counted_trials
from autotune.units import format_size

if TYPE_CHECKING:
    from autotune.storage.store import StudySummary


class _Commands(LazyGroup):
    lazy_commands = (
        LazyCommand(
            "check",
            "autotune.cli.studies_check:check",
            help="Check a studies database.",
        ),
        LazyCommand(
            "export",
            "autotune.cli.studies_files:export",
            help="Write studies with all their trials, predictions and attempts to a SQLite file.",
        ),
        LazyCommand(
            "import",
            "autotune.cli.studies_files:import_file",
            help="Import exported studies into a database: all of the file, or nothing.",
        ),
        LazyCommand(
            "trust",
            "autotune.cli.studies_trust:trust",
            help="Let the script or the Python model of a study run on this machine.",
        ),
    )


app = typer.Typer(
    cls=_Commands, invoke_without_command=True, add_completion=False, rich_markup_mode=None
)


@dataclass(frozen=True, kw_only=True)
class StudiesCommand(InStorage):
    """Where the studies are."""

    server: str | None = setting(None, INSTEAD_OF_STORAGE, group=RESULTS, metavar="URL")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_place(self.server, self.storage)


@app.callback()
@takes_request
def studies(context: typer.Context, request: StudiesCommand) -> None:
    """List the studies of a database; with a subcommand, check, export or import them."""
    if context.invoked_subcommand is None:
        if request.server is None:
            _list(request.storage)
        else:
            _list_of_server(request.server)
    elif request.server is not None:
        raise InvalidInput(
            f"autotune studies {context.invoked_subcommand} works on a database, not on a server",
            hint="run it on the server, and name the database with --storage",
        )


def _list(storage: str) -> None:
    with open_store(storage) as store:
        summaries = store.studies()
    console = make_console()
    if not summaries:
        console.print("no studies yet; begin one with: autotune search")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("study", overflow="fold")
    table.add_column("begun (UTC)", no_wrap=True)
    table.add_column("trials", no_wrap=True)
    if not is_narrow(console):
        table.add_column("state", no_wrap=True)
    table.add_column("cap", justify="right", no_wrap=True)
    table.add_column("pick", overflow="fold")
    damaged: list[tuple[str, AutotuneError]] = []
    for summary in summaries:
        try:
            table.add_row(*_cells(summary, storage=storage, narrow=is_narrow(console)))
        except StorageUnreachable:
            raise
        except (StorageUnavailable, InvalidInput) as error:
            # The others are listed first.
            damaged.append((summary.name, error))
    if table.rows:
        console.print(table)
    if damaged:
        name, first = damaged[0]
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        raise StorageUnavailable(
            f"study {name!r}{more} cannot be listed: {first.message}", hint=first.hint
        )


def _list_of_server(server: str) -> None:
    with open_client(server) as client:
        found = client.studies()
    console = make_console()
    if not found:
        console.print("no studies yet; begin one with: autotune submit")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("study", overflow="fold")
    table.add_column("begun (UTC)", no_wrap=True)
    table.add_column("trials", no_wrap=True)
    table.add_column("search", overflow="fold")
    for study in found:
        wanted = study.get("trials_wanted")
        trials = counted_trials(study["trials"], wanted) if wanted else str(study["trials"])
        begun = str(study["created_at"])[: len("2026-01-01 12:00")].replace("T", " ")
        state = study.get("state") or ""
        table.add_row(*(as_text(str(cell)) for cell in (study["name"], begun, trials, state)))
    console.print(table)


def _cells(summary: "StudySummary", *, storage: str, narrow: bool) -> list[Text]:
    """Returns the cells of a study; a narrow row has its day, and its pick in short."""
    result = api.show(summary.name, storage=storage)
    pick = "nothing feasible"
    if result.pick is not None:
        record = result.trial(result.pick.number)
        baseline = next((r for r in result.trials if r.number == result.baseline), None)
        pick = short_label(record, baseline) if narrow else trial_label(record)
    trials = counted_trials(summary.trials, summary.trials_wanted)
    cap = format_size(result.cap_bytes)
    if narrow:
        day, _, _ = summary.created_at.partition(" ")
        cells = [summary.name, day, trials, cap, pick]
    else:
        is_complete = summary.trials >= summary.trials_wanted
        state = "complete" if is_complete else "can be continued"
        cells = [summary.name, summary.created_at, trials, state, cap, pick]
    return [as_text(cell) for cell in cells]
