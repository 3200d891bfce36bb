"""`autotune show`: everything known of one study."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli import options
from autotune.errors import InvalidInput

if TYPE_CHECKING:
    from autotune.spec.result import StudyResult

MOST_INDENTED = 1000
"""Trials of an object of JSON that is printed on many lines."""


def show(
    study: options.StudyArgument,
    tolerance: options.ToleranceOption = None,
    prefer: options.PreferOption = options.PREFER,
    max_perplexity_increase: options.PerplexityOption = options.PERPLEXITY_INCREASE,
    storage: options.StorageOption = options.STORAGE,
    as_json: options.JsonOption = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print one row a trial, for spreadsheets.")
    ] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print pick, front and trials as Markdown tables.")
    ] = False,
    reference: Annotated[
        bool,
        typer.Option(
            "--reference",
            help="Print the rows of the published table that the search space holds, beside it.",
        ),
    ] = False,
) -> None:
    """Print every trial of a study, its front and the pick."""
    import autotune

    forms = [
        name
        for name, said in (("--json", as_json), ("--csv", as_csv), ("--markdown", as_markdown))
        if said
    ]
    if len(forms) > 1:
        raise InvalidInput(
            f"{' and '.join(forms)} are forms of one and the same output", hint="give one of them"
        )
    preferences = options.preferences_of(tolerance, prefer, max_perplexity_increase)
    if reference:
        _show_reference(study, storage=storage, forms=forms)
        return
    result = autotune.show(study, storage=storage, preferences=preferences)
    if as_json:
        # Indented, thousands of trials would take Python's own writer seconds.
        indent = 2 if len(result.trials) <= MOST_INDENTED else None
        print(json.dumps(result.to_dict(), indent=indent, allow_nan=False))
    elif as_csv or as_markdown:
        from autotune.reporting import plain_tables

        print(
            plain_tables.csv_text(result) if as_csv else plain_tables.markdown_text(result), end=""
        )
    else:
        _print_tables(result)


def _show_reference(study: str, *, storage: str, forms: list[str]) -> None:
    from autotune import api
    from autotune.cli.published import of_study, print_reference

    if "--csv" in forms:
        raise InvalidInput("--reference has no CSV form", hint="use --json or --markdown")
    answer = of_study(api.view(study, storage=storage))
    print_reference(answer, form="json" if "--json" in forms else "markdown" if forms else "table")


def _print_tables(result: "StudyResult") -> None:
    from autotune.cli.tables import make_console, print_pick, print_trials
    from autotune.reporting.outcomes import outcome_counts

    console = make_console()
    title = f"Study {result.study}: {outcome_counts(result.trials)}"
    print_trials(console, result, result.trials, title=title, with_predictions=True)
    console.print()
    print_pick(result, console)
