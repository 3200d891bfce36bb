"""`autotune report`: write a study as one HTML page, to send to a colleague."""

from pathlib import Path
from typing import Annotated

import typer

from autotune import __version__, api
from autotune.cli import options
from autotune.cli.output import check_writable, write_file
from autotune.errors import InvalidInput
from autotune.spec.study import RESULTS_FOLDER


def report(
    study: options.StudyArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="HTML file to write. [default: studies/STUDY-report.html]",
        ),
    ] = None,
    tolerance: options.ToleranceOption = None,
    prefer: options.PreferOption = options.PREFER,
    max_perplexity_increase: options.PerplexityOption = options.PERPLEXITY_INCREASE,
    storage: options.StorageOption = options.STORAGE,
) -> None:
    """Write a study as one HTML page that opens offline.

    The page holds the pick, figures, every trial and the commands to repeat the study.
    """
    # Templates and figures take 0.1 s to import, which the help of this command does without.
    from autotune.reporting.report import contents  # noqa: PLC0415
    from autotune.reporting.report.page import page  # noqa: PLC0415

    file = out or RESULTS_FOLDER / f"{study}-report.html"
    if file.suffix.lower() not in (".html", ".htm"):
        raise InvalidInput(
            f"a report is an HTML page, and cannot be written as {str(file)!r}",
            hint="end the file's name in .html",
        )
    check_writable(file)
    preferences = options.preferences_of(tolerance, prefer, max_perplexity_increase)
    view = api.view(study, storage=storage, preferences=preferences)
    text = page(contents.compute(view, version=__version__, preferences=preferences))
    write_file(file, text)
    print(file)
