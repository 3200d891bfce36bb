"""`autotune search`: the options of the command; `search_run.py` runs it."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from autotune.cli import options
from autotune.cli.lines import print_line
from autotune.cli.option_groups import (
    with_script_arguments,
    with_search_settings,
    with_workload,
)
from autotune.cli.server import check_one_place
from autotune.errors import InvalidInput
from autotune.spec.model_choice import with_model_config
from autotune.spec.option import EVERYDAY, RESULTS, THE_SEARCH
from autotune.spec.study import DEFAULT_STORAGE
from autotune.study.request import request_of


@with_search_settings
@with_workload
def search(
    *,
    context: typer.Context,
    settings: Mapping[str, Any],
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            rich_help_panel=EVERYDAY,
            help="Print what the search would do, with predicted peaks, without running a trial.",
        ),
    ] = False,
    time_trials: Annotated[
        bool,
        typer.Option(
            "--time-trials",
            rich_help_panel=THE_SEARCH,
            help="With --dry-run: time a few short trainings and estimate how long the search "
            "would take.",
        ),
    ] = False,
    workload: Mapping[str, Any],
    script_arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- ARGUMENTS",
            hidden=True,  # the help of --script says it, so that no heading stands before the first
        ),
    ] = None,
    tolerance: options.ToleranceOption = None,
    prefer: options.PreferOption = options.PREFER,
    max_perplexity_increase: options.PerplexityOption = options.PERPLEXITY_INCREASE,
    storage: options.StorageOption = options.STORAGE,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            rich_help_panel=RESULTS,
            metavar="URL",
            help="Run the search on a server that autotune serve has started, and show it here. "
            "Ctrl-C cancels it; autotune submit leaves it to the server.",
        ),
    ] = None,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", rich_help_panel=RESULTS, help="Print every trial at the end."
        ),
    ] = False,
) -> None:
    """Search for the fastest way to train a model under a memory cap.

    Runs short real trainings. Prints the Pareto front of memory, speed and perplexity, and a pick.
    """
    workload = with_script_arguments(workload, script_arguments, context)
    preferences = options.preferences_of(tolerance, prefer, max_perplexity_increase)
    if dry_run and as_json:
        raise InvalidInput("--dry-run has no JSON output", hint="leave --json out")
    if time_trials and not dry_run:
        raise InvalidInput(
            "--time-trials belongs to --dry-run", hint="add --dry-run, or leave --time-trials out"
        )
    if server is not None:
        # httpx, 0.2 s that a search here does without.
        from autotune.cli.submit import plan_on_server, search_on_server  # noqa: PLC0415

        check_one_place(server, storage)
        if time_trials:
            raise InvalidInput(
                "--time-trials runs trainings, which a server does only in its queue",
                hint="leave --time-trials out",
            )
        if dry_run:
            plan_on_server(server, {**settings, **workload}, preferences=preferences)
            return
        search_on_server(
            server,
            {**settings, **workload},
            preferences=preferences,
            as_json=as_json,
            quiet=quiet,
            verbose=verbose,
        )
        return
    request = request_of(
        {**settings, "storage": storage},
        workload=with_model_config(workload),
        preferences=preferences,
    )
    # These import numpy, which the help of this command does without.
    from autotune.study.requested_space import beginning_line, space_of  # noqa: PLC0415

    space = None
    if request.name is None and request.storage == DEFAULT_STORAGE:
        # A new study as far as is known here; a name or another database is looked up first.
        space = space_of(request)
        if not quiet:
            print_line(beginning_line(request, space), to_stderr=True, flush=True)
    # These import the database, half a second in which the line above is read.
    from autotune.cli.dry_run import print_plan  # noqa: PLC0415
    from autotune.cli.search_run import run_with_display  # noqa: PLC0415

    if dry_run:
        print_plan(request, space=space, time_trials=time_trials, quiet=quiet)
    else:
        run_with_display(request, space=space, as_json=as_json, quiet=quiet, verbose=verbose)
