"""`autotune studies`: list the studies of a database, or check, export or import them."""

from types import MappingProxyType

import typer
from rich.table import Table
from rich.text import Text

from autotune import api
from autotune.cli import options
from autotune.cli.database import open_store
from autotune.cli.lazy import LazyCommand, LazyGroup
from autotune.cli.tables import describe, make_console
from autotune.units import format_size


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
            help="Write studies with all their trials, predictions and attempts as JSON lines.",
        ),
        LazyCommand(
            "import",
            "autotune.cli.studies_files:import_file",
            help="Import exported studies into a database: all of the file, or nothing.",
        ),
    )
    meant_by = MappingProxyType(
        {"list": "autotune studies", "ls": "autotune studies", "show": "autotune show STUDY"}
    )


app = typer.Typer(
    cls=_Commands, invoke_without_command=True, add_completion=False, rich_markup_mode=None
)


@app.callback()
def studies(context: typer.Context, storage: options.StorageOption = options.STORAGE) -> None:
    """List the studies of a database; with a subcommand, check, export or import them."""
    if context.invoked_subcommand is None:
        _list(storage)


def _list(storage: str) -> None:
    with open_store(storage) as store:
        summaries = store.studies()
    table = Table(box=None, pad_edge=False)
    for column in ("study", "begun (UTC)", "trials", "state", "cap", "pick"):
        table.add_column(column, overflow="fold")
    for summary in summaries:
        result = api.show(summary.name, storage=storage)
        pick = (
            "nothing feasible"
            if result.pick is None
            else describe(result.trial(result.pick.number)).plain
        )
        table.add_row(
            summary.name,
            summary.created_at,
            f"{summary.trials}/{summary.trials_wanted}",
            "complete" if summary.trials >= summary.trials_wanted else "can be continued",
            format_size(result.cap_bytes),
            Text(pick),
        )
    make_console().print(table if summaries else "no studies yet; begin one with: autotune search")
