"""`autotune plot`: one figure of a study as a page that opens offline, a picture, or plotly's JSON."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli import options
from autotune.cli.output import HeightOption, ScaleOption, Target, WidthOption
from autotune.errors import InvalidInput
from autotune.reporting.figures import DEFAULT_KIND, FIGURES, FigureKind, FigureOptions, figure_kind
from autotune.reporting.figures.axes import AXES

if TYPE_CHECKING:
    from autotune.reporting.study_view import StudyView
    from autotune.spec.prediction import Prediction

_OPTION_OF = {
    "x": "--x",
    "y": "--y",
    "three_d": "--3d",
    "feasible": "--feasible",
    "trials": "--trials",
    "trial": "--trial",
}
_KINDS = "; ".join(f"{name}: {kind.summary}" for name, kind in FIGURES.items())


def plot(
    study: options.StudyArgument,
    kind: Annotated[str, typer.Argument(metavar="[KIND]", help=f"{_KINDS}.")] = DEFAULT_KIND,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="A .html that opens offline, .png, .svg or .json. "
            "[default: studies/STUDY.html, studies/STUDY-KIND.html]",
        ),
    ] = None,
    x: Annotated[
        str | None, typer.Option("--x", metavar="|".join(AXES), help="pareto: what lies across.")
    ] = None,
    y: Annotated[
        str | None, typer.Option("--y", metavar="|".join(AXES), help="pareto: what goes up.")
    ] = None,
    three_d: Annotated[
        bool, typer.Option("--3d", help="pareto: all three objectives in space.")
    ] = False,
    feasible: Annotated[
        bool, typer.Option("--feasible", help="parallel: feasible trials only.")
    ] = False,
    trials: Annotated[
        str | None,
        typer.Option(
            "--trials",
            metavar="0,4,7",
            help="memory: which ones. [default: baseline, pick and front]",
        ),
    ] = None,
    trial: Annotated[
        int | None, typer.Option("--trial", help="timeline: which one. [default: the pick]")
    ] = None,
    width: WidthOption = None,
    height: HeightOption = None,
    scale: ScaleOption = None,
    tolerance: options.ToleranceOption = None,
    prefer: options.PreferOption = options.PREFER,
    max_perplexity_increase: options.PerplexityOption = options.PERPLEXITY_INCREASE,
    storage: options.StorageOption = options.STORAGE,
) -> None:
    """Draw a study: the front unless another KIND is named. Writes one file and prints its name."""
    from dataclasses import replace

    from autotune import api
    from autotune.reporting.figure_page import figure_page
    from autotune.spec.study import RESULTS_FOLDER

    what = figure_kind(kind)
    said = FigureOptions(
        x=x, y=y, three_d=three_d, feasible=feasible, trials=_numbers(trials), trial=trial
    )
    _check_taken(kind, what, said)
    name = study if kind == DEFAULT_KIND else f"{study}-{kind}"
    target = Target(
        file=out or RESULTS_FOLDER / f"{name}.html", width=width, height=height, scale=scale
    )
    preferences = options.preferences_of(tolerance, prefer, max_perplexity_increase)
    view = api.view(study, storage=storage, preferences=preferences)
    if "prediction" in what.takes:
        said = replace(said, prediction=_timeline_of(view, trial))
    drawing = what.draw(view, said)
    target.write(
        drawing, title=f"{study}: {what.title}", page=lambda: figure_page(view, what, drawing)
    )
    print(target.file)


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(dict.fromkeys(int(number) for number in text.split(",")))
    except ValueError:
        raise InvalidInput(
            f"--trials {text!r} cannot be read",
            hint="give trial numbers with commas between, for example 0,4,7",
        ) from None


def _check_taken(name: str, kind: FigureKind, said: FigureOptions) -> None:
    """Raises InvalidInput for an option that this kind has no use for."""
    plain = FigureOptions()
    for field, option in _OPTION_OF.items():
        if getattr(said, field) != getattr(plain, field) and field not in kind.takes:
            takers = [other for other, one in FIGURES.items() if field in one.takes]
            mine = [_OPTION_OF[known] for known in kind.takes if known in _OPTION_OF]
            raise InvalidInput(
                f"figure {name!r} takes no {option}",
                hint=f"{option} is for {' and '.join(takers)}; {name} takes {', '.join(mine) or 'none of its own'}",
            )


def _timeline_of(view: "StudyView", number: int | None) -> "Prediction":
    """The step of one trial, predicted anew: predictions are kept without their timeline."""
    from tempfile import TemporaryDirectory

    from autotune.execution.local import LocalExecutor
    from autotune.reporting.figures.memory_timeline import trial_shown
    from autotune.study.predictions import Forecaster

    record = trial_shown(view, number)
    workload = view.definition.workload
    if workload.script is not None:
        raise InvalidInput(
            f"study {view.result.study!r} runs a script, whose steps cannot be predicted",
            hint=f"autotune plot {view.result.study} memory shows what was measured",
        )
    with TemporaryDirectory() as folder, LocalExecutor(Path(folder)) as executor:
        forecaster = Forecaster.of_device(
            view.definition.device, executor=executor, workload=workload
        )
        return forecaster.predict(record.config, with_timeline=True)
