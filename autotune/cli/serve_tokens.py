"""`autotune serve tokens`: add, list and remove the named tokens of a server's users."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from autotune.cli import options
from autotune.cli.database import open_store
from autotune.cli.lazy import LazyCommand, LazyGroup
from autotune.cli.tables import as_text, make_console

if TYPE_CHECKING:
    from autotune.storage.tokens import Tokens


class _Commands(LazyGroup):
    lazy_commands = (
        LazyCommand(
            "add",
            "autotune.cli.serve_tokens:add",
            help="Make a token for a user or a program, and print it once.",
        ),
        LazyCommand(
            "list",
            "autotune.cli.serve_tokens:list_tokens",
            help="List the named tokens, without the tokens themselves.",
        ),
        LazyCommand(
            "remove",
            "autotune.cli.serve_tokens:remove",
            help="Make a token invalid at once.",
        ),
    )


app = typer.Typer(
    cls=_Commands, invoke_without_command=True, add_completion=False, rich_markup_mode=None
)

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the token: who or what uses it.")
]


@app.callback()
def tokens(context: typer.Context, storage: options.StorageOption = options.STORAGE) -> None:
    """Add, list and remove the named tokens of a server's users.

    What is done with a token is logged under its name. A running server sees a change within
    seconds. Without a subcommand they are listed.
    """
    if context.invoked_subcommand is None:
        _list(context, storage)


def add(
    context: typer.Context,
    name: NameArgument,
    read_only: Annotated[
        bool,
        typer.Option(
            "--read-only", help="Let it look at everything, and neither submit nor change anything."
        ),
    ] = False,
    storage: options.StorageOption = options.STORAGE,
) -> None:
    """Make a token for a user or a program, and print it once."""
    with _open_tokens(context, storage, create=True) as tokens:
        print(tokens.add(name, read_only=read_only))


def list_tokens(context: typer.Context, storage: options.StorageOption = options.STORAGE) -> None:
    """List the named tokens, without the tokens themselves."""
    _list(context, storage)


def remove(
    context: typer.Context, name: NameArgument, storage: options.StorageOption = options.STORAGE
) -> None:
    """Make a token invalid at once.

    What was done with it stays in the log.
    """
    with _open_tokens(context, storage, create=False) as tokens:
        tokens.revoke(name)


def _list(context: typer.Context, storage: str) -> None:
    with _open_tokens(context, storage, create=False) as tokens:
        found = tokens.all()
    console = make_console()
    if not found:
        console.print("no named tokens yet; make one with: autotune serve tokens add NAME")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "may", "made (UTC)", "removed (UTC)"):
        table.add_column(column, overflow="fold")
    for token in found:
        may = "read" if token.is_read_only else "read and write"
        removed = "" if token.revoked_at is None else _minute(token.revoked_at)
        table.add_row(as_text(token.name), may, _minute(token.created_at), removed)
    console.print(table)


@contextmanager
def _open_tokens(context: typer.Context, storage: str, *, create: bool) -> Iterator["Tokens"]:
    # SQLAlchemy takes 0.3 s to import, which the help of a command does without.
    from autotune.storage.tokens import Tokens  # noqa: PLC0415

    with open_store(_storage_of(context, storage), create=create) as store:
        yield Tokens(store.database)


def _storage_of(context: typer.Context, storage: str) -> str:
    """Return the storage URL; it may stand before a subcommand: `autotune serve --storage URL ...`.

    The nearest one counts.
    """
    above = context.parent
    while storage == options.STORAGE and above is not None:
        storage = above.params.get("storage", storage)
        above = above.parent
    return storage


def _minute(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M")
