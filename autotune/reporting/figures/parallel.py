"""Parallel coordinates: one line a trial through its choices and what they came to.

Drag along an axis to select.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.errors import InvalidInput
from autotune.reporting import style
from autotune.reporting.figures.axes import Axis, capped_axis, make_axis, memory_unit
from autotune.reporting.study_view import StudyView
from autotune.spec.config import FIELD_ORDER
from autotune.spec.result import TrialRecord

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_LINES = 1000
"""More only cover each other, and take a browser half a minute where no graphics card helps."""
WIDTH_PER_AXIS = 105
"""Pixels: enough for the values of most techniques."""


@dataclass(frozen=True, kw_only=True)
class Coordinate:
    """One axis and where each trial crosses it."""

    title: str
    values: tuple[float, ...]
    ticks: tuple[str, ...] = ()
    """For a technique, its values in order: a line crosses at the position of its own."""


@dataclass(frozen=True, kw_only=True)
class ParallelFigure:
    numbers: tuple[int, ...]
    techniques: tuple[Coordinate, ...]
    objectives: tuple[Coordinate, ...]
    colour_title: str
    colours: tuple[float, ...]
    note: str


def compute(view: StudyView, *, feasible_only: bool = False) -> ParallelFigure:
    """Raises InvalidInput where no trial has all three numbers."""
    result = view.result
    unit = memory_unit(result.trials, cap_bytes=result.cap_bytes)
    axes = [
        make_axis(name, unit=unit)
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
    """All of a study of usual size; of a large one every so many, and the front."""
    every = math.ceil(len(shown) / MOST_LINES)
    kept = set(front)
    return [
        record for place, record in enumerate(shown) if place % every == 0 or record.number in kept
    ]


def nothing_to_show(view: StudyView, what: str) -> InvalidInput:
    """The error of a figure for which no trial of a study has what it shows."""
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


def draw(figure: ParallelFigure) -> "go.Figure":
    import plotly.graph_objects as go

    drawing = style.empty_figure(note=figure.note)
    coordinates = (*figure.techniques, *figure.objectives)
    drawing.add_trace(
        go.Parcoords(
            dimensions=[_dimension(coordinate) for coordinate in coordinates],
            line={"color": figure.colours, "coloraxis": "coloraxis"},
            labelangle=-20,
            customdata=figure.numbers,
        )
    )
    drawing.update_layout(
        coloraxis={
            "colorscale": style.SCALE,
            "colorbar": {"title": {"text": figure.colour_title, "side": "right"}},
        },
        margin={"t": 90, "l": _room_for(coordinates[0]), "r": 20, "b": 30},
        height=520,
    )
    style.on_narrow_screens(drawing, {}, least_width=120 + WIDTH_PER_AXIS * len(coordinates))
    return drawing


def _room_for(first: Coordinate) -> int:
    """Pixels left of the first axis, where its values stand."""
    return max(70, 20 + 7 * max(map(len, first.ticks), default=0))


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
