"""`autotune report`: write a study as one HTML page, to send to a colleague."""

from dataclasses import dataclass

from autotune import api
from autotune.cli.lines import print_line
from autotune.cli.options import ReadStudy
from autotune.cli.server import open_client
from autotune.reporting.output_file import write_file
from autotune.result import report_file
from autotune.spec.setting import FilePath, setting


@dataclass(frozen=True, kw_only=True)
class ReportCommand(ReadStudy):
    """A study to write as a page, and the file."""

    out: FilePath | None = setting(
        None, "HTML file to write. [default: studies/STUDY-report.html]", synonym="-o"
    )


def report(request: ReportCommand) -> None:
    """Write a study as one HTML page that opens offline.

    The page holds the pick, figures, every trial and the commands to repeat the study.
    """
    study, preferences = request.study, request.preferences
    if request.server is None:
        file = api.write_report(
            study, request.out, storage=request.storage, preferences=preferences
        )
    else:
        file = report_file(study, request.out)
        with open_client(request.server) as client:
            write_file(file, client.report(study, preferences=preferences))
    print_line(str(file))
