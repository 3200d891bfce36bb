"""`autotune search`: the options of the command; `search_run.py` runs it."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from autotune.cli import options
from autotune.cli.option_groups import with_search_settings, with_workload
from autotune.errors import InvalidInput
from autotune.spec.model_choice import with_model_config
from autotune.spec.option import EVERYDAY, RESULTS
from autotune.study.request import request_of


@with_search_settings
@with_workload
def search(
    *,
    settings: Mapping[str, Any],
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            rich_help_panel=EVERYDAY,
            help="Print what the search would do and how long it would take, without running it.",
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
    if script_arguments:
        workload = with_model_config({**workload, "script_arguments": script_arguments})
    request = request_of(
        {**settings, "storage": storage},
        workload=workload,
        preferences=options.preferences_of(tolerance, prefer, max_perplexity_increase),
    )
    if dry_run and as_json:
        raise InvalidInput("--dry-run has no JSON output", hint="leave --json out")
    # These import the database and numpy, which the help of this command does without.
    from autotune.cli.dry_run import print_plan  # noqa: PLC0415
    from autotune.cli.search_run import run_with_display  # noqa: PLC0415

    if dry_run:
        print_plan(request, quiet=quiet)
    else:
        run_with_display(request, as_json=as_json, quiet=quiet, verbose=verbose)
