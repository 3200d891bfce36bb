"""`autotune confirm`: measure the finalists of a study again, or one of its trials."""

from typing import Annotated

import typer

from autotune.cli import options
from autotune.cli.search_run import run_with_display
from autotune.spec.option import EVERYDAY, RESULTS
from autotune.study.confirmation.request import confirmation_request
from autotune.study.request import SEARCH_OPTIONS, SearchRequest


def confirm(
    study: options.StudyArgument,
    trial: Annotated[
        int | None,
        typer.Option(
            "--trial",
            rich_help_panel=EVERYDAY,
            metavar="N",
            help="Measure only this trial. [default: the pick, the front, and what may be as good]",
        ),
    ] = None,
    time_budget: Annotated[
        str | None,
        typer.Option(
            "--time-budget",
            rich_help_panel=EVERYDAY,
            metavar="TIME",
            help="Begin no measurement after this time: 5m, or none for no limit. "
            "[default: what --confirm-share leaves]",
        ),
    ] = None,
    share: Annotated[
        float, options.typer_option(SEARCH_OPTIONS["confirm_share"])
    ] = SearchRequest.confirm_share,
    ray: Annotated[str | None, options.typer_option(SEARCH_OPTIONS["ray"])] = None,
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
    """Measure the finalists of a study again, so that the pick is not the luckiest of many trials.

    Each is trained in turn with the baseline. What is shown of a confirmed trial is the confirmed
    speed, with an interval over further runs.
    """
    request, confirmation = confirmation_request(
        study,
        trial=trial,
        time_budget=time_budget,
        share=share,
        ray=ray,
        storage=storage,
        preferences=options.preferences_of(tolerance, prefer, max_perplexity_increase),
    )
    run_with_display(
        request, as_json=as_json, quiet=quiet, verbose=verbose, confirmation=confirmation
    )
