"""The kinds of figures of a study.

Importing this is cheap: plotly is imported when a figure is drawn.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autotune.errors import InvalidInput
from autotune.reporting.study_view import StudyView
from autotune.spec.prediction import Prediction

if TYPE_CHECKING:
    import plotly.graph_objects as go

DEFAULT_KIND = "pareto"


@dataclass(frozen=True, kw_only=True)
class FigureOptions:
    """Options of all figures. Each kind takes some of them, see `FigureKind.takes`."""

    x: str | None = None
    """Name of an axis: memory, device-memory, speed or perplexity."""
    y: str | None = None
    three_d: bool = False
    """Draw all three objectives in 3D."""
    feasible: bool = False
    """Draw feasible trials only."""
    trials: tuple[int, ...] | None = None
    trial: int | None = None
    prediction: Prediction | None = field(default=None, repr=False)
    """The prediction of `trial`, made with its timeline."""


@dataclass(frozen=True, kw_only=True)
class FigureKind:
    """A kind of figure: how it is named, which options it takes and how it is drawn."""

    title: str
    summary: str
    """One line for a list of the kinds."""
    takes: tuple[str, ...] = ()
    """Fields of `FigureOptions`."""
    draw: Callable[[StudyView, FigureOptions], "go.Figure"]
    """Raises InvalidInput if the study lacks the data that the figure shows."""


def _pareto(view: StudyView, options: FigureOptions) -> "go.Figure":
    from autotune.reporting.figures import pareto, pareto_drawing, pareto_space

    figure = pareto.compute(view, x=options.x, y=options.y)
    return pareto_space.draw(figure) if options.three_d else pareto_drawing.draw(figure)


def _parallel(view: StudyView, options: FigureOptions) -> "go.Figure":
    from autotune.reporting.figures import parallel

    return parallel.draw(parallel.compute(view, feasible_only=options.feasible))


def _importance(view: StudyView, _: FigureOptions) -> "go.Figure":
    from autotune.reporting.figures import importance

    return importance.draw(importance.compute(view))


def _ablation(view: StudyView, _: FigureOptions) -> "go.Figure":
    from autotune.reporting.figures import ablation

    return ablation.draw(ablation.compute(view))


def _memory(view: StudyView, options: FigureOptions) -> "go.Figure":
    from autotune.reporting.figures import memory_at_peak

    return memory_at_peak.draw(memory_at_peak.compute(view, trials=options.trials))


def _timeline(view: StudyView, options: FigureOptions) -> "go.Figure":
    from autotune.reporting.figures import memory_timeline

    return memory_timeline.draw(
        memory_timeline.compute_of_trial(view, options.prediction, number=options.trial)
    )


def _history(view: StudyView, _: FigureOptions) -> "go.Figure":
    from autotune.reporting.figures import history

    return history.draw(history.compute(view))


def _predicted(view: StudyView, _: FigureOptions) -> "go.Figure":
    from autotune.reporting.figures import predicted

    return predicted.draw(predicted.compute(view))


FIGURES: Mapping[str, FigureKind] = {
    "pareto": FigureKind(
        title="Memory, speed and perplexity",
        summary="memory against speed, perplexity as colour: the cap, the front and the pick",
        takes=("x", "y", "three_d"),
        draw=_pareto,
    ),
    "parallel": FigureKind(
        title="The choices of each trial",
        summary="parallel coordinates of techniques and objectives",
        takes=("feasible",),
        draw=_parallel,
    ),
    "importance": FigureKind(
        title="Importance of techniques",
        summary="importance of each technique for each objective",
        draw=_importance,
    ),
    "ladder": FigureKind(
        title="What each technique gains",
        summary="what each technique saves and costs, alone and on top of the others",
        draw=_ablation,
    ),
    "memory": FigureKind(
        title="Who holds the memory at the peak",
        summary="bytes by category at the peak of chosen trials",
        takes=("trials",),
        draw=_memory,
    ),
    "timeline": FigureKind(
        title="Memory over one step",
        summary="memory over one training step of a trial, predicted",
        takes=("trial", "prediction"),
        draw=_timeline,
    ),
    "history": FigureKind(
        title="How the search went",
        summary="best so far and hypervolume, over trials and over time",
        draw=_history,
    ),
    "predicted": FigureKind(
        title="Predicted and measured peak memory",
        summary="predicted against measured peak memory",
        draw=_predicted,
    ),
}


def figure_kind(name: str) -> FigureKind:
    """Return the kind of figure of that name. Raises InvalidInput for an unknown name."""
    if name not in FIGURES:
        raise InvalidInput(f"there is no figure {name!r}", hint=f"use one of {', '.join(FIGURES)}")
    return FIGURES[name]
