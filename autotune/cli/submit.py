"""`autotune submit`: put a search in the queue of a server, and leave it there."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from autotune.analysis.pick import Preferences
from autotune.cli import options
from autotune.cli.lines import print_line
from autotune.cli.option_groups import (
    with_script_arguments,
    with_search_settings,
    with_workload,
)
from autotune.cli.server import NeededServerOption, command_on_server, open_client
from autotune.errors import AutotuneError
from autotune.spec.option import EVERYDAY
from autotune.standard_streams import answer


@with_search_settings
@with_workload
def submit(
    *,
    context: typer.Context,
    settings: Mapping[str, Any],
    server: NeededServerOption = None,
    priority: Annotated[
        int,
        typer.Option(
            "--priority",
            rich_help_panel=EVERYDAY,
            metavar="N",
            help="From -100 to 100: those with a higher one run first.",
        ),
    ] = 0,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            rich_help_panel=EVERYDAY,
            metavar="NAME",
            help="Group of devices of the server to run on. [default: the one that is free first]",
        ),
    ] = None,
    workload: Mapping[str, Any],
    script_arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- ARGUMENTS",
            hidden=True,  # as in `autotune search`
        ),
    ] = None,
    tolerance: options.ToleranceOption = None,
    prefer: options.PreferOption = options.PREFER,
    max_perplexity_increase: options.PerplexityOption = options.PERPLEXITY_INCREASE,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Put a search in the queue of a server.

    Takes the options of autotune search, and prints the number of the search and where to look. A
    search space and a model's config.json are files of this machine, datasets and scripts are files
    of the server.
    """
    workload = with_script_arguments(workload, script_arguments, context)
    preferences = options.preferences_of(tolerance, prefer, max_perplexity_increase)
    with open_client(server) as client:
        search = client.submit(
            priority=priority, group=group, preferences=preferences, **settings, **workload
        )
        queue = command_on_server(["queue"], client)
        with answer(hint=f"search {search.id} is in the queue: {queue}"):
            if as_json:
                print(json.dumps(search.answer, indent=2))
                return
            if quiet:
                print_line(str(search.id))
                return
            place = ""
            if search.position is not None:
                place = f", at place {search.position} of the queue"
            study = f" for study {search.study}" if search.study else ""
            print_line(f"Search {search.id}{study} is {search.state}{place}.")
            watch = command_on_server(["watch", str(search.id)], client)
            print_line(f"  {watch}  # follow it")
            print_line(f"  {search.url}  # its page")


def plan_on_server(server: str, settings: Mapping[str, Any], *, preferences: Preferences) -> None:
    """Print what a search on a server would do, as `autotune search --dry-run` does here."""
    from autotune.cli.dry_run import print_plan_of_server  # noqa: PLC0415  # as below

    with open_client(server) as client:
        plan = client.dry_run(preferences=preferences, **settings)
    print_plan_of_server(plan)


def search_on_server(
    server: str,
    settings: Mapping[str, Any],
    *,
    preferences: Preferences,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Submit a search, follow it and print its result, as `autotune search` does here.

    SIGINT and SIGTERM cancel it.
    """
    # These import httpx and numpy, which the help of `autotune submit` does without.
    from autotune.cli.remote_search import (  # noqa: PLC0415
        Interrupted,
        command_to_continue,
        follow,
        interrupts,
        print_ended,
    )

    with open_client(server) as client, interrupts():
        search = None
        try:
            search = client.submit(preferences=preferences, **settings)
            search = follow(
                client,
                search,
                quiet=quiet,
                preferences=preferences,
                until_converged=bool(settings.get("until_converged")),
            )
        except Interrupted as interrupted:
            if search is None:
                print_line("Stopped before the search was submitted.", to_stderr=True)
            else:
                try:
                    client.cancel(search.id)
                except AutotuneError as error:
                    print_line(f"Search {search.id} is not cancelled: {error}", to_stderr=True)
                again = command_to_continue(client.search(search.id), client)
                if again is None:
                    print_line("Cancelled before the study began.", to_stderr=True)
                else:
                    cancelled = "Cancelled; every finished trial is stored. Continue with:"
                    print_line(cancelled, to_stderr=True)
                    print_line(f"  {again}", to_stderr=True)
            raise typer.Exit(128 + interrupted.number) from None
        print_ended(client, search, preferences=preferences, as_json=as_json, verbose=verbose)
