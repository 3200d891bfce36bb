"""`autotune report`: write a study as one HTML page, to send to a colleague."""

from pathlib import Path
from typing import Annotated

import typer

from autotune import api
from autotune.cli import options
from autotune.cli.lines import print_line
from autotune.cli.server import ServerOption, check_one_place, open_client
from autotune.reporting.output_file import write_file
from autotune.result import report_file


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
    server: ServerOption = None,
) -> None:
    """Write a study as one HTML page that opens offline.

    The page holds the pick, figures, every trial and the commands to repeat the study.
    """
    preferences = options.preferences_of(tolerance, prefer, max_perplexity_increase)
    if server is None:
        print_line(str(api.write_report(study, out, storage=storage, preferences=preferences)))
        return
    check_one_place(server, storage)
    file = report_file(study, out)
    with open_client(server) as client:
        write_file(file, client.report(study, preferences=preferences))
    print_line(str(file))
