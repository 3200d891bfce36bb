"""The figures a study can be looked at in: one entry a kind.

Naming them costs nothing: plotly is loaded to draw.
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
    """What may be said about a figure. Each kind takes some of them: `FigureKind.takes`."""

    x: str | None = None
    """An axis: memory, device-memory, speed or perplexity."""
    y: str | None = None
    three_d: bool = False
    """All three objectives in space."""
    feasible: bool = False
    """Feasible trials only."""
    trials: tuple[int, ...] | None = None
    trial: int | None = None
    prediction: Prediction | None = field(default=None, repr=False)
    """Of `trial`, made with its timeline."""


@dataclass(frozen=True, kw_only=True)
class FigureKind:
    title: str
    summary: str
    """One line for a list of the kinds."""
    takes: tuple[str, ...] = ()
    """Fields of `FigureOptions`."""
    draw: Callable[[StudyView, FigureOptions], "go.Figure"]
    """Raises InvalidInput where the study has not what it shows."""


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


def _ladder(view: StudyView, _: FigureOptions) -> "go.Figure":
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
        title="What each trial chose",
        summary="parallel coordinates of techniques and objectives",
        takes=("feasible",),
        draw=_parallel,
    ),
    "importance": FigureKind(
        title="Which techniques decide",
        summary="which techniques set the best trials of each objective apart",
        draw=_importance,
    ),
    "ladder": FigureKind(
        title="What each technique buys",
        summary="what each technique saves and costs, alone and on top of the others",
        draw=_ladder,
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
    """Raises InvalidInput for a kind that there is not."""
    if name not in FIGURES:
        raise InvalidInput(f"there is no figure {name!r}", hint=f"use one of {', '.join(FIGURES)}")
    return FIGURES[name]
