"""Any two objectives of a study's trials, the third as colour: the cap, the front, the pick.

Memory against speed unless said otherwise. Drawn on paper by `pareto_drawing.py`, in space by
`pareto_space.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.errors import InvalidInput
from autotune.reporting.figures.axes import Axis, capped_axis, make_axis, memory_unit
from autotune.reporting.study_view import StudyView
from autotune.reporting.trial_text import full_hover, short_hover
from autotune.spec.result import StudyResult, TrialRecord
from autotune.units import format_size

MANY = 400
"""From here on marks are drawn by the graphics card, with short texts and without error bars off
the front."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One trial in the picture, in the axes' units."""

    number: int
    x: float
    y: float
    colour: float | None
    """None: not measured, as of some that are not feasible, which are grey anyway."""
    spread_x: float
    spread_y: float
    on_front: bool
    feasible: bool
    hover: str


@dataclass(frozen=True, kw_only=True)
class ParetoFigure:
    """All that the picture shows, ready to draw."""

    x: Axis
    y: Axis
    colour: Axis
    cap: float
    """In the unit of memory."""
    cap_axis: str | None
    """`x`, `y` or `colour`: the axis that the cap is held against, where there is one."""
    cap_words: str
    marks: tuple[Mark, ...]
    front_line: tuple[tuple[float, float], ...]
    """Corners of the line along the front, from the best x to the worst."""
    not_timed: tuple[tuple[float, str], ...]
    """Memory and hover text of trials over the cap, which were stopped before they had a speed."""
    pick: int | None
    baseline: int | None
    note: str

    @property
    def is_large(self) -> bool:
        return len(self.marks) > MANY


def compute(view: StudyView, *, x: str | None = None, y: str | None = None) -> ParetoFigure:
    """Raises InvalidInput for an axis that there is not, and for one axis twice."""
    result = view.result
    axes = _axes(result, x, y)
    drawn = [
        record for record in result.trials if all(axis.of(record) is not None for axis in axes[:2])
    ]
    numbers = {record.number for record in drawn}
    undrawn = [record for record in result.trials if record.number not in numbers]
    hover = full_hover if len(drawn) <= MANY else lambda record, _: short_hover(record)
    front = frozenset(result.front)
    marks = tuple(_mark(r, front, axes, hover(r, view.baseline)) for r in drawn)
    unit = memory_unit(result.trials, cap_bytes=result.cap_bytes)
    cap_name = capped_axis(result.device.type)
    cap_axis = next(
        (
            place
            for place, axis in zip(("x", "y", "colour"), axes, strict=True)
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
        not_timed=tuple(
            _not_timed(undrawn, axes, hover=lambda record: hover(record, view.baseline))
        ),
        pick=None if result.pick is None else result.pick.number,
        baseline=result.baseline,
        note=_note(result, axes, drawn),
    )


def _axes(result: StudyResult, x: str | None, y: str | None) -> tuple[Axis, Axis, Axis]:
    memory = capped_axis(result.device.type)
    unit = memory_unit(result.trials, cap_bytes=result.cap_bytes)
    left = make_axis(x or (memory if y not in ("memory", "device-memory") else "speed"), unit=unit)
    up = make_axis(y or ("speed" if left.name != "speed" else memory), unit=unit)
    if left.name == up.name:
        raise InvalidInput(
            f"both axes are {left.name}", hint="name two different ones with --x and --y"
        )
    third = next(n for n in ("perplexity", "speed", memory) if n not in (left.name, up.name))
    return left, up, make_axis(third, unit=unit)


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
        # One that ended early, beaten, fits as well, and is off the front like the others that are
        # beaten.
        feasible=record.feasible or record.outcome == "dominated",
        hover=hover,
    )


def _front_line(marks: Sequence[Mark], x: Axis, y: Axis) -> tuple[tuple[float, float], ...]:
    """From the best x to the worst, through what improves y; those on the front for the third objective lie off it."""
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
    return [(axes[0].of(r) or 0.0, hover(r)) for r in undrawn if axes[0].of(r)]


def _note(result: StudyResult, axes: Sequence[Axis], drawn: Sequence[TrialRecord]) -> str:
    spreads = [
        axis.spread_is for axis in axes[:2] if any(axis.spread_of(record) for record in drawn)
    ]
    sentences = [f"{'; '.join(spreads).capitalize()}."] if spreads else []
    shown = [axis.name for axis in axes]
    if result.device.type == "cuda" and "memory" in shown and "device-memory" not in shown:
        sentences.append(_offset(result))
    missing = len(result.trials) - len(drawn)
    if missing:
        words = f"{axes[0].name.replace('-', ' ')} or {axes[1].name.replace('-', ' ')}"
        sentences.append(f"Without a measured {words}: {missing} of {len(result.trials)} trials.")
    return " ".join(sentences)


def _offset(result: StudyResult) -> str:
    """On CUDA the cap is no line on the axis of peak memory: how far apart the two are differs from trial to trial."""
    both = [(r.device_bytes, r.peak_memory_bytes) for r in result.trials]
    apart = [device - peak for device, peak in both if device and peak]
    words = (
        f", which is {format_size(min(apart))} to {format_size(max(apart))} more" if apart else ""
    )
    return f"The cap of {format_size(result.cap_bytes)} is held against what the device must have{words}."
