"""`autotune watch`: follow a search of a server to its end."""

from typing import Annotated

import typer

from autotune.cli import options
from autotune.cli.server import NeededServerOption, open_client
from autotune.errors import InvalidInput
from autotune.spec.option import RESULTS


def watch(
    search: Annotated[
        str,
        typer.Argument(
            metavar="SEARCH",
            help="Number of a search, or the name of its study; see autotune queue.",
        ),
    ],
    server: NeededServerOption = None,
    tolerance: options.ToleranceOption = None,
    prefer: options.PreferOption = options.PREFER,
    max_perplexity_increase: options.PerplexityOption = options.PERPLEXITY_INCREASE,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", rich_help_panel=RESULTS, help="Print every trial at the end."
        ),
    ] = False,
) -> None:
    """Follow a search of a server to its end, and print its result.

    Ctrl-C leaves the search running. The exit codes are those of autotune search.
    """
    preferences = options.preferences_of(tolerance, prefer, max_perplexity_increase)
    # These import httpx and numpy, which the help of this command does without.
    from autotune.cli.remote_search import (  # noqa: PLC0415
        Interrupted,
        follow,
        interrupts,
        print_ended,
        print_left,
    )

    with open_client(server) as client, interrupts():
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
            found = follow(client, found, quiet=quiet, preferences=preferences)
        except Interrupted as interrupted:
            print_left(client, found)
            raise typer.Exit(128 + interrupted.number) from None
        print_ended(client, found, preferences=preferences, as_json=as_json, verbose=verbose)
