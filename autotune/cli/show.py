"""`autotune show`: print the trials, the front and the pick of one study."""

import json
from dataclasses import dataclass

from autotune import api
from autotune.cli.options import ReadStudy, Shown
from autotune.cli.published import print_reference
from autotune.cli.tables import make_console, print_pick, print_trials
from autotune.errors import InvalidInput
from autotune.reporting.outcomes import outcome_counts
from autotune.reporting.plain_tables import csv_text, markdown_text
from autotune.spec.result import StudyResult
from autotune.spec.setting import setting

MOST_INDENTED = 1000
"""The JSON of a study with more trials is printed on one line."""


@dataclass(frozen=True, kw_only=True)
class ShowCommand(ReadStudy, Shown):
    """A study to print, and the form."""

    as_csv: bool = setting(
        False, "Print CSV with one row per trial, for spreadsheets.", flag="--csv"
    )
    as_markdown: bool = setting(
        False, "Print the pick, the front and the trials as Markdown tables.", flag="--markdown"
    )
    reference: bool = setting(
        False, "Compare the study with the published table of its search space."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        forms = {"--json": self.as_json, "--csv": self.as_csv, "--markdown": self.as_markdown}
        given = [flag for flag, is_given in forms.items() if is_given]
        if len(given) > 1:
            raise InvalidInput(f"{' and '.join(given)} exclude each other", hint="give one of them")
        if self.reference and self.server is not None:
            raise InvalidInput(
                "--reference needs the database of the study", hint="run it on the server"
            )
        if self.reference and self.as_csv:
            raise InvalidInput("--reference has no CSV form", hint="use --json or --markdown")


def show(request: ShowCommand) -> None:
    """Print every trial of a study, its front and the pick."""
    if request.reference:
        view = api.view(request.study, storage=request.storage)
        print_reference(view, as_json=request.as_json, as_markdown=request.as_markdown)
        return
    with request.result() as result:
        if request.as_json:
            # Indentation makes Python's JSON writer take seconds for thousands of trials.
            indent = 2 if len(result.trials) <= MOST_INDENTED else None
            print(json.dumps(result.to_dict(), indent=indent, allow_nan=False))
        elif request.as_csv:
            print(csv_text(result), end="")
        elif request.as_markdown:
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
