"""Pareto figure: two objectives as axes and the third as colour, with the cap, front and pick.

The default axes are memory and speed. `pareto_drawing.py` draws the figure in 2D, `pareto_space.py`
in 3D.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.errors import InvalidInput
from autotune.reporting import style
from autotune.reporting.figures.axes import Axis, capped_axis, make_axis, memory_unit
from autotune.reporting.study_view import StudyView
from autotune.reporting.trial_text import full_hover, short_hover
from autotune.spec.result import StudyResult, TrialRecord
from autotune.units import format_size

MANY = 400
"""More marks than this are drawn with WebGL, with short hover texts and, except on the front,
without error bars."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One trial in the figure, in the units of the axes."""

    number: int
    x: float
    y: float
    colour: float | None
    """None if it was not measured, as in some infeasible trials, which are drawn in grey."""
    spread_x: float
    spread_y: float
    on_front: bool
    feasible: bool
    hover: str


@dataclass(frozen=True, kw_only=True)
class ParetoFigure:
    """All data of the figure, ready to draw."""

    x: Axis
    y: Axis
    colour: Axis
    cap: float
    """Memory cap, in the unit of memory."""
    cap_axis: str | None
    """The axis to which the cap applies: `x`, `y` or `colour`; None if it applies to none."""
    cap_words: str
    marks: tuple[Mark, ...]
    front_line: tuple[tuple[float, float], ...]
    """Corners (x, y) of the line along the front, from the best x to the worst."""
    not_timed: tuple[tuple[float, str], ...]
    """Memory and hover text of trials that were stopped over the cap before they had a speed."""
    pick: int | None
    baseline: int | None
    note: str

    @property
    def is_large(self) -> bool:
        return len(self.marks) > MANY


def compute(view: StudyView, *, x: str | None = None, y: str | None = None) -> ParetoFigure:
    """Compute the figure with axes `x` and `y`, by name.

    Raises InvalidInput for an unknown axis, and if both axes are the same.
    """
    result = view.result
    axes = _axes(result, x, y)
    drawn = [
        record for record in result.trials if all(axis.of(record) is not None for axis in axes[:2])
    ]
    numbers = {record.number for record in drawn}
    undrawn = [record for record in result.trials if record.number not in numbers]

    def hover(record: TrialRecord) -> str:
        if len(drawn) > MANY:
            return short_hover(record)
        return full_hover(record, view.baseline)

    front = frozenset(result.front)
    marks = tuple(_mark(record, front, axes, hover(record)) for record in drawn)
    unit = memory_unit(result.trials, cap_bytes=result.cap_bytes)
    cap_name = capped_axis(result.device.type)
    cap_axis = next(
        (
            position
            for position, axis in zip(("x", "y", "colour"), axes, strict=True)
            if axis.name == cap_name
        ),
        None,
    )
    return ParetoFigure(
        x=axes[0],
        y=axes[1],
        colour=axes[2],
        cap=unit.of(result.cap_bytes),
        cap_axis=cap_axis,
        cap_words=f"cap {format_size(result.cap_bytes)}",
        marks=marks,
        front_line=_front_line(marks, axes[0], axes[1]),
        not_timed=tuple(_not_timed(undrawn, axes, hover=hover)),
        pick=None if result.pick is None else result.pick.number,
        baseline=result.baseline,
        note=_note(result, axes, drawn),
    )


def _axes(result: StudyResult, x: str | None, y: str | None) -> tuple[Axis, Axis, Axis]:
    memory = capped_axis(result.device.type)
    unit = memory_unit(result.trials, cap_bytes=result.cap_bytes)
    if not x:
        x = "speed" if y in ("memory", "device-memory") else memory
    x_axis = make_axis(x, unit=unit, terms=result.terms)
    if not y:
        y = memory if x == "speed" else "speed"
    y_axis = make_axis(y, unit=unit, terms=result.terms)
    if x_axis.name == y_axis.name:
        raise InvalidInput(
            f"both axes are {x_axis.name}", hint="name two different ones with --x and --y"
        )
    third = next(
        name for name in ("perplexity", "speed", memory) if name not in (x_axis.name, y_axis.name)
    )
    return x_axis, y_axis, make_axis(third, unit=unit, terms=result.terms)


def _mark(
    record: TrialRecord, front: frozenset[int], axes: tuple[Axis, Axis, Axis], hover: str
) -> Mark:
    return Mark(
        number=record.number,
        x=axes[0].of(record) or 0.0,
        y=axes[1].of(record) or 0.0,
        colour=axes[2].of(record),
        spread_x=axes[0].spread_of(record),
        spread_y=axes[1].spread_of(record),
        on_front=record.number in front,
        # A trial that was stopped early as dominated fits under the cap as well.
        feasible=record.feasible or record.outcome == "dominated",
        hover=hover,
    )


def _front_line(marks: Sequence[Mark], x: Axis, y: Axis) -> tuple[tuple[float, float], ...]:
    """Returns the line from the best x to the worst, through the marks of the front that improve y.

    Marks that are on the front for the third objective lie off the line.
    """
    front = sorted(
        (m for m in marks if m.on_front), key=lambda m: m.x if x.is_lower_better else -m.x
    )
    line: list[tuple[float, float]] = []
    for mark in front:
        if not line or y.is_better(mark.y, line[-1][1]):
            line.append((mark.x, mark.y))
    return tuple(line)


def _not_timed(
    undrawn: Sequence[TrialRecord], axes: Sequence[Axis], *, hover: Callable[[TrialRecord], str]
) -> list[tuple[float, str]]:
    if axes[0].unit is None or axes[1].name != "speed":
        return []
    memory = [(axes[0].of(record), record) for record in undrawn]
    return [(size, hover(record)) for size, record in memory if size]


def _note(result: StudyResult, axes: Sequence[Axis], drawn: Sequence[TrialRecord]) -> str:
    spreads = [
        axis.spread_is for axis in axes[:2] if any(axis.spread_of(record) for record in drawn)
    ]
    sentences = [f"{'; '.join(spreads).capitalize()}."] if spreads else []
    shown = [axis.name for axis in axes]
    if result.device.type == "cuda" and "memory" in shown and "device-memory" not in shown:
        sentences.append(_cap_note(result))
    missing = len(result.trials) - len(drawn)
    if missing:
        names = f"{axes[0].name.replace('-', ' ')} or {axes[1].name.replace('-', ' ')}"
        sentences.append(f"Without a measured {names}: {missing} of {len(result.trials)} trials.")
    return " ".join(sentences)


def _cap_note(result: StudyResult) -> str:
    """Say why a CUDA figure of peak memory has no line for the cap.

    The cap applies to device memory, and its difference to the peak varies between trials.
    """
    sizes = [(record.device_bytes, record.peak_memory_bytes) for record in result.trials]
    differences = [device - peak for device, peak in sizes if device and peak]
    note = f"The cap of {format_size(result.cap_bytes)} applies to the memory the device must have"
    if differences:
        note += (
            f", which is {format_size(min(differences))} to {format_size(max(differences))} more"
        )
    return f"{note}."


def colour_scale(marks: Sequence[Mark], *, title: str) -> dict[str, object]:
    """Returns the colour scale of the third objective, hidden if no mark has a colour.

    It spans at least 2 %, so that noise does not look like a difference.
    """
    values = [mark.colour for mark in marks if mark.colour is not None]
    lowest = min(values, default=1.0)
    return {
        "showscale": bool(values),
        "colorscale": style.SCALE,
        "cmin": lowest,
        "cmax": max(max(values, default=1.0), 1.02 * lowest),
        "colorbar": {"title": {"text": title, "side": "right"}},
    }
