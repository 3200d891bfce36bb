"""Parallel coordinates: one line per trial through its choices and results.

Dragging along an axis selects trials. The figure of this name in `optuna.visualization` cannot do
that: it draws a trace for each trial, for a thousand trials ten times the bytes in four times the
time, and with a `target` it has one objective.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from autotune.errors import InvalidInput
from autotune.reporting import style
from autotune.reporting.figures import FigureOptions
from autotune.reporting.figures.axes import Axis, capped_axis, make_axis, memory_unit
from autotune.reporting.study_view import StudyView
from autotune.spec.config import FIELD_ORDER
from autotune.spec.result import TrialRecord

MOST_LINES = 1000
"""More lines cover each other, and take a browser half a minute without a graphics card."""
WIDTH_PER_AXIS = 105
"""Pixels: enough for the values of most techniques."""


@dataclass(frozen=True, kw_only=True)
class Coordinate:
    """One axis and where each trial crosses it."""

    title: str
    values: tuple[float, ...]
    ticks: tuple[str, ...] = ()
    """The values of a technique in order: a line crosses the axis at the position of its value."""


@dataclass(frozen=True, kw_only=True)
class ParallelFigure:
    """All data of the figure, ready to draw."""

    numbers: tuple[int, ...]
    techniques: tuple[Coordinate, ...]
    objectives: tuple[Coordinate, ...]
    colour_title: str
    colours: tuple[float, ...]
    note: str


def compute(view: StudyView, *, feasible_only: bool = False) -> ParallelFigure:
    """Compute the figure. Raises InvalidInput if no trial has memory, speed and perplexity."""
    result = view.result
    unit = memory_unit(result.trials, cap_bytes=result.cap_bytes)
    axes = [
        make_axis(name, unit=unit, terms=result.terms)
        for name in (capped_axis(result.device.type), "perplexity", "speed")
    ]
    shown = [
        record
        for record in result.trials
        if (record.feasible or not feasible_only)
        and all(axis.of(record) is not None for axis in axes)
    ]
    if not shown:
        raise nothing_to_show(
            view, "is feasible" if feasible_only else "has memory, speed and perplexity"
        )
    tried = len(shown)
    shown = _thinned(shown, result.front)
    varying = [field for field in FIELD_ORDER if len({getattr(r.config, field) for r in shown}) > 1]
    return ParallelFigure(
        numbers=tuple(record.number for record in shown),
        techniques=tuple(_technique(field, shown) for field in varying),
        objectives=tuple(_objective(axis, shown) for axis in axes),
        colour_title=axes[-1].title,
        colours=tuple(axes[-1].of(record) or 0.0 for record in shown),
        note=_note(view, shown, varying, tried=tried, feasible_only=feasible_only),
    )


def _thinned(shown: Sequence[TrialRecord], front: Sequence[int]) -> list[TrialRecord]:
    """Returns at most about `MOST_LINES` trials, evenly spaced, and always the front."""
    every = math.ceil(len(shown) / MOST_LINES)
    on_front = set(front)
    return [
        record
        for index, record in enumerate(shown)
        if index % every == 0 or record.number in on_front
    ]


def nothing_to_show(view: StudyView, what: str) -> InvalidInput:
    """Returns the error for a figure if no trial of the study has the data that it shows."""
    study, number = view.result.study, len(view.result.trials)
    tried = f"none of the {number} trials" if number > 1 else "no trial"
    return InvalidInput(
        f"{tried} of study {study!r} {what}", hint=f"see autotune show {study} for how they ended"
    )


def _technique(field: str, shown: Sequence[TrialRecord]) -> Coordinate:
    values = [getattr(record.config, field) for record in shown]
    order = sorted(set(values), key=lambda value: (isinstance(value, str), value))
    return Coordinate(
        title=field.removesuffix("_size").replace("_", " "),
        values=tuple(float(order.index(value)) for value in values),
        ticks=tuple(str(value) for value in order),
    )


def _objective(axis: Axis, shown: Sequence[TrialRecord]) -> Coordinate:
    return Coordinate(
        title=axis.title, values=tuple(float(f"{axis.of(record) or 0.0:.4g}") for record in shown)
    )


def _note(
    view: StudyView,
    shown: Sequence[TrialRecord],
    varying: Sequence[str],
    *,
    tried: int,
    feasible_only: bool,
) -> str:
    which = "feasible trials" if feasible_only else "trials with all numbers, feasible or not"
    if len(shown) < tried:
        which += f", evenly spaced ones of {tried} and the front"
    sentences = [
        f"{len(shown)} of {len(view.result.trials)} trials: {which}.",
        "Drag along an axis to select.",
    ]
    if same := [field.replace("_", " ") for field in FIELD_ORDER if field not in varying]:
        sentences.append(f"The same in all: {', '.join(same)}.")
    return " ".join(sentences)


def plot(view: StudyView, options: FigureOptions) -> go.Figure:
    """Compute the figure of a study and draw it."""
    return draw(compute(view, feasible_only=options.feasible))


def draw(figure: ParallelFigure) -> go.Figure:
    """Draw one axis per technique and objective, coloured by speed."""
    drawing = style.styled(go.Figure(), note=figure.note)
    coordinates = (*figure.techniques, *figure.objectives)
    drawing.add_trace(
        go.Parcoords(
            dimensions=[_dimension(coordinate) for coordinate in coordinates],
            line={"color": figure.colours, "coloraxis": "coloraxis"},
            labelangle=-20,
            customdata=figure.numbers,
        )
    )
    longest = max(map(len, coordinates[0].ticks), default=0)
    drawing.update_layout(
        coloraxis={
            "colorscale": style.SCALE,
            "colorbar": {"title": {"text": figure.colour_title, "side": "right"}},
        },
        margin={"t": 90, "l": max(70, 20 + 7 * longest), "r": 20, "b": 30},
        height=520,
    )
    style.on_narrow_screens(drawing, {}, least_width=120 + WIDTH_PER_AXIS * len(coordinates))
    return drawing


def _dimension(coordinate: Coordinate) -> dict[str, object]:
    if not coordinate.ticks:
        return {"label": coordinate.title, "values": coordinate.values, "tickformat": ",~r"}
    return {
        "label": coordinate.title,
        "values": coordinate.values,
        "tickvals": list(range(len(coordinate.ticks))),
        "ticktext": coordinate.ticks,
        "range": [-0.3, len(coordinate.ticks) - 0.7],
    }
