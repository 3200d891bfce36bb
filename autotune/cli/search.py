"""`autotune search`: the options of the command; `search_run.py` runs it."""

import shlex
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from autotune.cli import options
from autotune.cli.help import AFTER_SEPARATOR
from autotune.cli.option_groups import with_search_settings, with_workload
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
        before_separator = len(script_arguments) - context.meta[AFTER_SEPARATOR]
        if workload.get("script") is not None and before_separator:
            raise InvalidInput(
                f"{script_arguments[0]!r} is no option of autotune search",
                hint=f"put arguments of the script behind a separate --: autotune search --script "
                f"{shlex.quote(workload['script'])} ... -- {shlex.join(script_arguments)}",
            )
        workload = with_model_config({**workload, "script_arguments": script_arguments})
    request = request_of(
        {**settings, "storage": storage},
        workload=workload,
        preferences=options.preferences_of(tolerance, prefer, max_perplexity_increase),
    )
    if dry_run and as_json:
        raise InvalidInput("--dry-run has no JSON output", hint="leave --json out")
    if time_trials and not dry_run:
        raise InvalidInput(
            "--time-trials belongs to --dry-run", hint="add --dry-run, or leave --time-trials out"
        )
    # These import numpy, which the help of this command does without.
    from autotune.study.requested_space import beginning_line, space_of  # noqa: PLC0415

    space = None
    if request.name is None and request.storage == DEFAULT_STORAGE:
        # A new study as far as is known here; a name or another database is looked up first.
        space = space_of(request)
        if not quiet:
            print(beginning_line(request, space), file=sys.stderr, flush=True)
    # These import the database, half a second in which the line above is read.
    from autotune.cli.dry_run import print_plan  # noqa: PLC0415
    from autotune.cli.search_run import run_with_display  # noqa: PLC0415

    if dry_run:
        print_plan(request, space=space, time_trials=time_trials, quiet=quiet)
    else:
        run_with_display(request, space=space, as_json=as_json, quiet=quiet, verbose=verbose)
