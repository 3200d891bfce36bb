"""`autotune report`: one HTML page about a study, to send to a colleague."""

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli import options
from autotune.cli.output import check_writable, write_file
from autotune.errors import InvalidInput


def report(
    study: options.StudyArgument,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="[default: studies/STUDY-report.html]"),
    ] = None,
    tolerance: options.ToleranceOption = None,
    prefer: options.PreferOption = options.PREFER,
    max_perplexity_increase: options.PerplexityOption = options.PERPLEXITY_INCREASE,
    storage: options.StorageOption = options.STORAGE,
) -> None:
    """Write all of a study as one page that opens offline: answer, figures, every trial, how to repeat it."""
    import autotune
    from autotune import api
    from autotune.reporting.report import contents
    from autotune.reporting.report.page import page
    from autotune.spec.study import RESULTS_FOLDER

    file = out or RESULTS_FOLDER / f"{study}-report.html"
    if file.suffix.lower() not in (".html", ".htm"):
        raise InvalidInput(
            f"a report is a page, and cannot be written as {str(file)!r}",
            hint="end the file's name in .html",
        )
    check_writable(file)
    preferences = options.preferences_of(tolerance, prefer, max_perplexity_increase)
    view = api.view(study, storage=storage, preferences=preferences)
    text = page(contents.compute(view, version=autotune.__version__, preferences=preferences))
    write_file(file, text)
    print(file)
