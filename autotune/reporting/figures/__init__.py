"""The kinds of figures of a study: a table of what each is called and of the module that draws it.

Importing this is cheap: a figure's module, and plotly with it, is imported when it is drawn.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autotune.errors import InvalidInput, suggestion
from autotune.reporting.figures.axes import AxisName
from autotune.reporting.study_view import StudyView
from autotune.spec.prediction import Prediction
from autotune.spec.setting import (
    THE_FIGURE,
    Settings,
    TrialList,
    TrialNumber,
    options_of,
    setting,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go

DEFAULT_KIND = "pareto"


@dataclass(frozen=True, kw_only=True)
class FigureOptions(Settings):
    """Options of all figures. Each kind takes some of them, see `FigureKind.takes`."""

    x: AxisName | None = setting(
        None, "pareto: quantity of the x axis.", group=THE_FIGURE, over_http=True
    )
    y: AxisName | None = setting(
        None, "pareto: quantity of the y axis.", group=THE_FIGURE, over_http=True
    )
    three_d: bool = setting(
        False,
        "pareto: draw all three objectives in 3D.",
        group=THE_FIGURE,
        flag="--3d",
        over_http=True,
    )
    feasible: bool = setting(
        False, "parallel: draw feasible trials only.", group=THE_FIGURE, over_http=True
    )
    trials: TrialList | None = setting(
        None,
        "memory: numbers of the trials. [default: baseline, pick and front]",
        group=THE_FIGURE,
        metavar="0,4,7",
        over_http=True,
    )
    trial: TrialNumber | None = setting(
        None,
        "timeline: number of the trial. [default: the pick]",
        group=THE_FIGURE,
        over_http=True,
    )
    prediction: Prediction | None = field(default=None, repr=False)
    """The prediction of `trial`, made with its timeline."""
    predictions: Mapping[str, Prediction] | None = field(default=None, repr=False)
    """By fingerprint, those of trials whose predictions the study does not have."""


@dataclass(frozen=True, kw_only=True)
class FigureKind:
    """A kind of figure: how it is named, which options it takes and how it is drawn."""

    title: str
    summary: str
    """One line for a list of the kinds."""
    takes: tuple[str, ...] = ()
    """Fields of `FigureOptions`."""
    module: str
    """The module that draws it, by its function `plot(view, options)`."""

    def draw(self, view: StudyView, options: FigureOptions) -> "go.Figure":
        """Import the module, and plotly with it, and draw the figure.

        Raises InvalidInput if the study lacks the data that the figure shows.
        """
        figure: go.Figure = importlib.import_module(self.module).plot(view, options)
        return figure


FIGURES: Mapping[str, FigureKind] = {
    "pareto": FigureKind(
        title="Memory, speed and perplexity",
        summary="memory against speed, perplexity as colour: the cap, the front and the pick",
        takes=("x", "y", "three_d"),
        module="autotune.reporting.figures.pareto_drawing",
    ),
    "parallel": FigureKind(
        title="The choices of each trial",
        summary="parallel coordinates of techniques and objectives",
        takes=("feasible",),
        module="autotune.reporting.figures.parallel",
    ),
    "importance": FigureKind(
        title="Importance of techniques",
        summary="importance of each technique for each objective",
        module="autotune.reporting.figures.importance",
    ),
    "ladder": FigureKind(
        title="What each technique gains",
        summary="what each technique saves and costs, alone and on top of the others",
        module="autotune.reporting.figures.ablation",
    ),
    "memory": FigureKind(
        title="Who holds the memory at the peak",
        summary="bytes by category at the peak of chosen trials",
        takes=("trials",),
        module="autotune.reporting.figures.memory_at_peak",
    ),
    "timeline": FigureKind(
        title="Memory over one step",
        summary="memory over one training step of a trial, predicted",
        takes=("trial", "prediction"),
        module="autotune.reporting.figures.memory_timeline",
    ),
    "roofline": FigureKind(
        title="How far from what the device can do",
        summary="FLOPs per second against FLOPs per byte accessed, under the device's roofline",
        takes=("predictions",),
        module="autotune.reporting.figures.roofline",
    ),
    "history": FigureKind(
        title="How the search went",
        summary="best so far and hypervolume, over trials and over time",
        module="autotune.reporting.figures.history",
    ),
    "predicted": FigureKind(
        title="Predicted and measured peak memory",
        summary="predicted against measured peak memory",
        module="autotune.reporting.figures.predicted",
    ),
    "predicted-speed": FigureKind(
        title="Predicted and measured speed",
        summary="predicted against measured tokens per second",
        module="autotune.reporting.figures.predicted_speed",
    ),
}


def figure_kind(name: str) -> FigureKind:
    """Returns the kind of figure of that name. Raises InvalidInput for an unknown name."""
    if name not in FIGURES:
        raise InvalidInput(
            f"there is no figure {name!r}",
            hint=suggestion(name, FIGURES, otherwise=f"use one of {', '.join(FIGURES)}"),
        )
    return FIGURES[name]


def check_options(name: str, given: FigureOptions) -> None:
    """Raise InvalidInput if an option is given that this kind of figure does not take."""
    kind = figure_kind(name)
    options = options_of(FigureOptions)
    for keyword, option in options.items():
        if keyword in kind.takes or getattr(given, keyword) == option.default:
            continue
        kinds = [other for other, figure in FIGURES.items() if keyword in figure.takes]
        taken = [options[known].flag for known in kind.takes if known in options]
        raise InvalidInput(
            f"figure {name!r} takes no {option.flag}",
            hint=f"{option.flag} is for {' and '.join(kinds)}; "
            f"{name} takes {', '.join(taken) or 'no options'}",
        )
