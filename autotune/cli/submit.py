"""`autotune submit`: put a search in the queue of a server, and leave it there."""

import json
from dataclasses import dataclass
from typing import Any

import typer

from autotune.analysis.pick import Preferences
from autotune.cli.lines import print_line
from autotune.cli.options import OnServer, ShownInFull, ShownQuietly
from autotune.cli.requests import Given, taken_from
from autotune.cli.server import command_on_server, open_client
from autotune.errors import AutotuneError
from autotune.study.submission import Submission
from autotune.system.standard_streams import answer


@dataclass(frozen=True, kw_only=True)
class SubmitCommand(Submission, OnServer, ShownQuietly):
    """A submission, the server that it is for, and how its number is shown."""


def submit(given: Given[SubmitCommand]) -> None:
    """Put a search in the queue of a server.

    Takes the options of autotune search, and prints the number of the search and where to look. A
    search space and a model's config.json are files of this machine, datasets and scripts are files
    of the server.
    """
    server, shown = taken_from(given, OnServer).server, taken_from(given, ShownQuietly)
    preferences = taken_from(given, Preferences)
    with open_client(server) as client:
        search = client.submit(preferences=preferences, **given)
        queue = command_on_server(["queue"], client)
        with answer(hint=f"search {search.id} is in the queue: {queue}"):
            if shown.as_json:
                print(json.dumps(search.answer, indent=2))
                return
            if shown.quiet:
                print_line(str(search.id))
                return
            place = ""
            if search.position is not None:
                place = f", at place {search.position} of the queue"
            waiting = f" It {search.waiting}." if search.waiting else ""
            study = f" for study {search.study}" if search.study else ""
            print_line(f"Search {search.id}{study} is {search.state}{place}.{waiting}")
            watch = command_on_server(["watch", str(search.id)], client)
            print_line(f"  {watch}  # follow it")
            print_line(f"  {search.url}  # its page")


def plan_on_server(given: Given[Any]) -> None:
    """Print what a search on a server would do, as `autotune search --dry-run` does here."""
    from autotune.cli.dry_run import print_plan_of_server  # noqa: PLC0415  # as below

    del given["dry_run"]
    server, _ = taken_from(given, OnServer).server, taken_from(given, ShownInFull)
    preferences = taken_from(given, Preferences)
    with open_client(server) as client:
        plan = client.dry_run(preferences=preferences, **given)
    print_plan_of_server(plan)


def search_on_server(given: Given[Any]) -> None:
    """Submit a search, follow it and print its result, as `autotune search` does here.

    SIGINT and SIGTERM cancel it.
    """
    # These import httpx and numpy, which the help of `autotune submit` does without.
    from autotune.cli.remote_search import (  # noqa: PLC0415
        Interrupted,
        command_to_continue,
        follow,
        interrupts,
        print_result_of_server,
        say_waiting,
    )

    server, shown = taken_from(given, OnServer).server, taken_from(given, ShownInFull)
    preferences = taken_from(given, Preferences)
    with open_client(server) as client, client.patient(say_waiting) as patient:
        search = None
        try:
            with interrupts():
                search = patient.submit(preferences=preferences, **given)
                search = follow(
                    patient,
                    search,
                    quiet=shown.quiet,
                    preferences=preferences,
                    until_converged=bool(given.get("until_converged")),
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
        print_result_of_server(patient, search, preferences=preferences, shown=shown)
