"""`autotune report`: write a study as one HTML page, to send to a colleague."""

from dataclasses import dataclass

from autotune.cli.lines import print_line
from autotune.cli.options import ReadStudy
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
    file = report_file(request.study, request.out)
    with request.result() as result:
        print_line(str(result.write_report(file)))
