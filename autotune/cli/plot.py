"""`autotune plot`: draw one figure of a study as an HTML page, an image or plotly's JSON."""

from dataclasses import dataclass

from autotune.cli.lines import print_line
from autotune.cli.options import ReadStudy
from autotune.cli.output import ImageSize, Target
from autotune.reporting.figures import (
    DEFAULT_KIND,
    FIGURES,
    FigureOptions,
    check_options,
    figure_kind,
)
from autotune.spec.setting import RESULTS, FilePath, part, setting
from autotune.spec.study import RESULTS_FOLDER

_KINDS = "; ".join(f"{name}: {kind.summary}" for name, kind in FIGURES.items())


@dataclass(frozen=True, kw_only=True)
class PlotCommand(ReadStudy):
    """A figure of a study, and the file that it is written to."""

    kind: str = setting(
        DEFAULT_KIND,
        f"Kind of figure. {_KINDS}.",
        metavar="[KIND]",
        choices=tuple(FIGURES),
        is_argument=True,
    )
    out: FilePath | None = setting(
        None,
        "File to write: .html (opens offline), .png, .svg or .json. "
        "[default: studies/STUDY.html, studies/STUDY-KIND.html]",
        group=RESULTS,
        synonym="-o",
    )
    figure: FigureOptions = part(FigureOptions, default=FigureOptions())
    image: ImageSize = part(ImageSize, default=ImageSize())


def plot(request: PlotCommand) -> None:
    """Draw a figure of a study, by default its front, and print the name of the file."""
    # plotly takes 0.1 s to import, which the help of this command does without.
    from autotune.reporting.figure_page import figure_page  # noqa: PLC0415

    study, kind = request.study, request.kind
    figure = figure_kind(kind)
    check_options(kind, request.figure)
    name = study if kind == DEFAULT_KIND else f"{study}-{kind}"
    target = Target(file=request.out or RESULTS_FOLDER / f"{name}.html", size=request.image)
    with request.result() as result:
        drawing = result.figure(kind, request.figure)
    target.write(
        drawing, title=f"{study}: {figure.title}", page=lambda: figure_page(result, figure, drawing)
    )
    print_line(str(target.file))
