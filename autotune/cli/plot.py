"""`autotune plot`: draw one figure of a study as an HTML page, an image or plotly's JSON."""

from pathlib import Path
from typing import Annotated

import typer

from autotune import api
from autotune.cli import completion, options
from autotune.cli.lines import print_line
from autotune.cli.output import HeightOption, ScaleOption, Target, WidthOption
from autotune.cli.server import ServerOption, check_one_place, open_client
from autotune.errors import InvalidInput
from autotune.reporting.figures import (
    DEFAULT_KIND,
    FIGURES,
    FigureOptions,
    check_options,
    figure_kind,
)
from autotune.reporting.figures.axes import AXES
from autotune.result import draw
from autotune.spec.option import RESULTS, THE_FIGURE
from autotune.spec.result import StudyResult
from autotune.spec.study import RESULTS_FOLDER

_KINDS = "; ".join(f"{name}: {kind.summary}" for name, kind in FIGURES.items())


def plot(
    study: options.StudyArgument,
    kind: Annotated[
        str,
        typer.Argument(
            metavar="[KIND]",
            autocompletion=completion.one_of(FIGURES),
            help=f"Kind of figure. {_KINDS}.",
        ),
    ] = DEFAULT_KIND,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            rich_help_panel=RESULTS,
            metavar="FILE",
            help="File to write: .html (opens offline), .png, .svg or .json. "
            "[default: studies/STUDY.html, studies/STUDY-KIND.html]",
        ),
    ] = None,
    x: Annotated[
        str | None,
        typer.Option(
            "--x",
            rich_help_panel=THE_FIGURE,
            metavar="|".join(AXES),
            autocompletion=completion.one_of(AXES),
            help="pareto: quantity of the x axis.",
        ),
    ] = None,
    y: Annotated[
        str | None,
        typer.Option(
            "--y",
            rich_help_panel=THE_FIGURE,
            metavar="|".join(AXES),
            autocompletion=completion.one_of(AXES),
            help="pareto: quantity of the y axis.",
        ),
    ] = None,
    three_d: Annotated[
        bool,
        typer.Option(
            "--3d", rich_help_panel=THE_FIGURE, help="pareto: draw all three objectives in 3D."
        ),
    ] = False,
    feasible: Annotated[
        bool,
        typer.Option(
            "--feasible", rich_help_panel=THE_FIGURE, help="parallel: draw feasible trials only."
        ),
    ] = False,
    trials: Annotated[
        str | None,
        typer.Option(
            "--trials",
            rich_help_panel=THE_FIGURE,
            metavar="0,4,7",
            help="memory: numbers of the trials. [default: baseline, pick and front]",
        ),
    ] = None,
    trial: Annotated[
        int | None,
        typer.Option(
            "--trial",
            rich_help_panel=THE_FIGURE,
            help="timeline: number of the trial. [default: the pick]",
        ),
    ] = None,
    width: WidthOption = None,
    height: HeightOption = None,
    scale: ScaleOption = None,
    tolerance: options.ToleranceOption = None,
    prefer: options.PreferOption = options.PREFER,
    max_perplexity_increase: options.PerplexityOption = options.PERPLEXITY_INCREASE,
    storage: options.StorageOption = options.STORAGE,
    server: ServerOption = None,
) -> None:
    """Draw a figure of a study, by default its front, and print the name of the file."""
    # plotly takes 0.1 s to import, which the help of this command does without.
    from autotune.reporting.figure_page import figure_page  # noqa: PLC0415

    figure = figure_kind(kind)
    figure_options = FigureOptions(
        x=x, y=y, three_d=three_d, feasible=feasible, trials=_numbers(trials), trial=trial
    )
    check_options(kind, figure_options)
    name = study if kind == DEFAULT_KIND else f"{study}-{kind}"
    target = Target(
        file=out or RESULTS_FOLDER / f"{name}.html", width=width, height=height, scale=scale
    )
    preferences = options.preferences_of(tolerance, prefer, max_perplexity_increase)
    if server is None:
        view = api.view(study, storage=storage, preferences=preferences)
        result: StudyResult = view.result
        drawing = draw(view, kind, figure_options)
    else:
        check_one_place(server, storage)
        with open_client(server) as client:
            result = client.show(study, preferences=preferences)
            drawing = client.figure(
                study,
                kind,
                x=x,
                y=y,
                three_d=three_d,
                feasible=feasible,
                trials=figure_options.trials,
                trial=trial,
                preferences=preferences,
            )
    target.write(
        drawing, title=f"{study}: {figure.title}", page=lambda: figure_page(result, figure, drawing)
    )
    print_line(str(target.file))


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(dict.fromkeys(int(number) for number in text.split(",")))
    except ValueError:
        raise InvalidInput(
            f"Invalid value of --trials: {text!r}",
            hint="give trial numbers separated by commas, for example 0,4,7",
        ) from None
