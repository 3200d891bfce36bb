"""`autotune watch`: follow a search of a server to its end."""

from dataclasses import dataclass

import typer

from autotune.analysis.pick import DEFAULT_PREFERENCES, Preferences
from autotune.cli.options import OnServer, ShownInFull
from autotune.cli.server import open_client
from autotune.errors import InvalidInput
from autotune.spec.setting import part, setting


@dataclass(frozen=True, kw_only=True)
class WatchCommand(OnServer, ShownInFull):
    """A search to follow, and how its result is shown."""

    search: str = setting(
        help="Number of a search, or the name of its study; see autotune queue.",
        metavar="SEARCH",
        is_argument=True,
    )
    preferences: Preferences = part(Preferences, default=DEFAULT_PREFERENCES)


def watch(request: WatchCommand) -> None:
    """Follow a search of a server to its end, and print its result.

    Ctrl-C leaves the search running. The exit codes are those of autotune search.
    """
    search, preferences = request.search, request.preferences
    # These import httpx and numpy, which the help of this command does without.
    from autotune.cli.remote_search import (  # noqa: PLC0415
        Interrupted,
        follow,
        interrupts,
        print_left,
        print_result_of_server,
        say_waiting,
    )

    with open_client(request.server) as impatient, impatient.patient(say_waiting) as client:
        if search.isdecimal():
            found = client.search(int(search))
        else:
            of_study = client.searches(study=search)
            if not of_study:
                raise InvalidInput(
                    f"the server has no search of a study {search!r}",
                    hint=f"see autotune queue; autotune show {search} --server {client.url} prints "
                    "a study that was made otherwise",
                )
            found = max(of_study, key=lambda each: each.id)
        try:
            with interrupts():
                found = follow(client, found, quiet=request.quiet, preferences=preferences)
        except Interrupted as interrupted:
            print_left(client, found)
            raise typer.Exit(128 + interrupted.number) from None
        print_result_of_server(client, found, preferences=preferences, shown=request)
