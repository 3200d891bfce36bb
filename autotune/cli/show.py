"""`autotune show`: print the trials, the front and the pick of one study."""

import json
from typing import Annotated

import typer

from autotune import api
from autotune.cli import options
from autotune.cli.published import print_reference
from autotune.cli.server import ServerOption, check_one_place, open_client
from autotune.cli.tables import make_console, print_pick, print_trials
from autotune.errors import InvalidInput
from autotune.reporting.outcomes import outcome_counts
from autotune.reporting.plain_tables import csv_text, markdown_text
from autotune.spec.result import StudyResult

MOST_INDENTED = 1000
"""The JSON of a study with more trials is printed on one line."""


def show(
    study: options.StudyArgument,
    tolerance: options.ToleranceOption = None,
    prefer: options.PreferOption = options.PREFER,
    max_perplexity_increase: options.PerplexityOption = options.PERPLEXITY_INCREASE,
    storage: options.StorageOption = options.STORAGE,
    server: ServerOption = None,
    as_json: options.JsonOption = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print CSV with one row per trial, for spreadsheets.")
    ] = False,
    as_markdown: Annotated[
        bool,
        typer.Option(
            "--markdown", help="Print the pick, the front and the trials as Markdown tables."
        ),
    ] = False,
    reference: Annotated[
        bool,
        typer.Option(
            "--reference",
            help="Compare the study with the published table of its search space.",
        ),
    ] = False,
) -> None:
    """Print every trial of a study, its front and the pick."""
    formats = {"--json": as_json, "--csv": as_csv, "--markdown": as_markdown}
    forms = [option for option, is_given in formats.items() if is_given]
    if len(forms) > 1:
        raise InvalidInput(f"{' and '.join(forms)} exclude each other", hint="give one of them")
    preferences = options.preferences_of(tolerance, prefer, max_perplexity_increase)
    if reference:
        if server is not None:
            raise InvalidInput(
                "--reference needs the database of the study", hint="run it on the server"
            )
        if as_csv:
            raise InvalidInput("--reference has no CSV form", hint="use --json or --markdown")
        view = api.view(study, storage=storage)
        print_reference(view, as_json=as_json, as_markdown=as_markdown)
        return
    if server is None:
        result: StudyResult = api.show(study, storage=storage, preferences=preferences)
        values = result.to_dict() if as_json else {}
    else:
        check_one_place(server, storage)
        from autotune.client.study_json import result_of  # noqa: PLC0415  # only with a server

        with open_client(server) as client:
            values = client.study_json(study, preferences=preferences)
        result = result_of(values)
    if as_json:
        # Indentation makes Python's JSON writer take seconds for thousands of trials.
        indent = 2 if len(result.trials) <= MOST_INDENTED else None
        print(json.dumps(values, indent=indent, allow_nan=False))
    elif as_csv:
        print(csv_text(result), end="")
    elif as_markdown:
        print(markdown_text(result), end="")
    else:
        _print_tables(result)


def _print_tables(result: StudyResult) -> None:
    console = make_console()
    title = f"Study {result.study}: {outcome_counts(result.trials)}"
    print_trials(
        console,
        result,
        result.trials,
        title=title,
        with_predictions=True,
        with_before_training=True,
    )
    console.print()
    print_pick(result, console)
