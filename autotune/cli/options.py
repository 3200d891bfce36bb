"""Settings that several commands share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import typer

from autotune import api
from autotune.analysis.pick import DEFAULT_PREFERENCES, Preferences
from autotune.cli.server import check_one_place, looked_for_here, looked_for_on, open_client
from autotune.client.address import SERVER_VARIABLE
from autotune.result import Result
from autotune.spec.setting import RESULTS, Settings, part, setting
from autotune.spec.study import DEFAULT_STORAGE

INSTEAD_OF_STORAGE = "URL of a server that autotune serve has started, instead of --storage."


@dataclass(frozen=True, kw_only=True)
class Shown(Settings):
    """How a command shows what it has found."""

    as_json: bool = setting(
        False, "Print one JSON object and nothing else.", group=RESULTS, flag="--json"
    )


@dataclass(frozen=True, kw_only=True)
class ShownQuietly(Shown):
    """The same of a command that takes a while."""

    quiet: bool = setting(False, "Print only what is waited for.", group=RESULTS, synonym="-q")


@dataclass(frozen=True, kw_only=True)
class ShownInFull(ShownQuietly):
    """The same of a command that ends with the result of a study."""

    verbose: bool = setting(False, "Print every trial at the end.", group=RESULTS, synonym="-v")


@dataclass(frozen=True, kw_only=True)
class InStorage(Settings):
    """Where the studies are."""

    storage: str = setting(
        DEFAULT_STORAGE, "URL of the studies database.", group=RESULTS, metavar="URL"
    )


@dataclass(frozen=True, kw_only=True)
class OfStudy(InStorage):
    """A study of a database."""

    study: str = setting(
        help="Name of a study; see autotune studies.", metavar="STUDY", is_argument=True
    )


@dataclass(frozen=True, kw_only=True)
class ReadStudy(OfStudy):
    """A study of a database or of a server, and how its pick is chosen."""

    preferences: Preferences = part(Preferences, default=DEFAULT_PREFERENCES)
    server: str | None = setting(
        None,
        f"{INSTEAD_OF_STORAGE} [default: the variable {SERVER_VARIABLE}, without --storage]",
        group=RESULTS,
        metavar="URL",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_place(self.server, self.storage)

    @contextmanager
    def result(self) -> Iterator[Result]:
        """Yield the study, read here or from the server that the command names.

        What its methods ask of a server they ask until then. Raises UnknownStudy.
        """
        if self.server is None:
            with looked_for_here(self.storage):
                found = api.show(self.study, storage=self.storage, preferences=self.preferences)
            yield found
            return
        with open_client(self.server) as client:
            with looked_for_on(self.server):
                there = client.show(self.study, preferences=self.preferences)
            yield there


@dataclass(frozen=True, kw_only=True)
class OnServer(Settings):
    """The server that a command asks."""

    server: str | None = setting(
        None,
        f"URL that autotune serve prints. [default: the variable {SERVER_VARIABLE}]",
        group=RESULTS,
        metavar="URL",
    )


def storage_of(context: typer.Context, storage: str) -> str:
    """Returns the storage URL of a subcommand; it may also stand before the subcommand.

    The nearest one counts: `autotune studies --storage URL check`.
    """
    above = context.parent
    while storage == DEFAULT_STORAGE and above is not None:
        storage = above.params.get("storage") or storage
        above = above.parent
    return storage
