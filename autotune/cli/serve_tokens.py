"""`autotune serve tokens`: add, list and remove the named tokens of a server's users."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import typer
from rich.table import Table

from autotune.cli.database import open_store
from autotune.cli.lazy import LazyCommand, LazyGroup
from autotune.cli.options import InStorage, storage_of
from autotune.cli.requests import takes_request
from autotune.cli.tables import as_text, make_console
from autotune.service.settings import WebAddress
from autotune.spec.setting import Duration, setting

if TYPE_CHECKING:
    from autotune.storage.tokens import TokenRole, Tokens


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


@dataclass(frozen=True, kw_only=True)
class TokenCommand(InStorage):
    """A token by its name."""

    name: str = setting(
        help="Name of the token: who or what uses it.", metavar="NAME", is_argument=True
    )


@dataclass(frozen=True, kw_only=True)
class AddCommand(TokenCommand):
    """A token to make."""

    role: Literal["reader", "member", "admin"] = setting(
        "member",
        "What it may do: read; submit, and change what is its own; or change everything.",
    )
    expires: Duration | None = setting(None, "Let it expire after this time: 90d. [default: never]")
    read_only: bool = setting(False, "The same as --role reader.")
    webhook: WebAddress | None = setting(
        None, "Send a message to this URL when a search of that name ends.", metavar="URL"
    )


@app.callback()
@takes_request
def tokens(context: typer.Context, request: InStorage) -> None:
    """Add, list and remove the named tokens of a server's users.

    What is done with a token is logged under its name. A running server sees a change within
    seconds. Without a subcommand they are listed.
    """
    if context.invoked_subcommand is None:
        _list(context, request.storage)


def add(context: typer.Context, request: AddCommand) -> None:
    """Make a token for a user or a program, and print it once."""
    with _open_tokens(context, request.storage, create=True) as tokens:
        role: TokenRole = "reader" if request.read_only else request.role
        lasts, webhook = request.expires, request.webhook
        print(tokens.add(request.name, role=role, valid_seconds=lasts, webhook=webhook))


def list_tokens(context: typer.Context, request: InStorage) -> None:
    """List the named tokens, without the tokens themselves."""
    _list(context, request.storage)


def remove(context: typer.Context, request: TokenCommand) -> None:
    """Make a token invalid at once.

    What was done with it stays in the log.
    """
    with _open_tokens(context, request.storage, create=False) as tokens:
        tokens.revoke(request.name)


def _list(context: typer.Context, storage: str) -> None:
    with _open_tokens(context, storage, create=False) as tokens:
        found = tokens.all()
    console = make_console()
    if not found:
        console.print("no named tokens yet; make one with: autotune serve tokens add NAME")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "role", "made (UTC)", "expires (UTC)", "removed (UTC)", "told at"):
        table.add_column(column, overflow="fold")
    for token in found:
        moments = (token.created_at, token.expires_at, token.revoked_at)
        # The path of such a URL is a secret.
        told_at = "" if token.webhook is None else urlsplit(token.webhook).hostname or ""
        cells = [token.name, token.role, *map(_minute, moments), told_at]
        table.add_row(*map(as_text, cells))
    console.print(table)


@contextmanager
def _open_tokens(context: typer.Context, storage: str, *, create: bool) -> Iterator["Tokens"]:
    # SQLAlchemy takes 0.3 s to import, which the help of a command does without.
    from autotune.storage.tokens import Tokens  # noqa: PLC0415

    with open_store(storage_of(context, storage), create=create) as store:
        yield Tokens(store.database)


def _minute(moment: datetime | None) -> str:
    return "" if moment is None else moment.strftime("%Y-%m-%d %H:%M")
