"""The figures of a report, each with a text alternative and its numbers as a table."""

from collections.abc import Callable
from dataclasses import dataclass

import plotly.graph_objects as go

from autotune.errors import InvalidInput
from autotune.reporting.columns import BLANK
from autotune.reporting.figures import (
    ablation,
    memory_at_peak,
    pareto,
    pareto_drawing,
    predicted,
    predicted_speed,
    roofline,
)
from autotune.reporting.study_view import StudyView
from autotune.reporting.style import note_of
from autotune.reporting.table import Table
from autotune.reporting.trial_text import format_utilization, trial_label
from autotune.spec.result import TrialRecord
from autotune.units import format_rate, format_size

_HEIGHT = 540
"""Pixels of a figure that does not set its height."""


@dataclass(frozen=True, kw_only=True)
class ReportFigure:
    """A drawn figure of the page."""

    alternative: str
    """Description for readers who cannot see the figure."""
    drawing: go.Figure
    table: Table | None = None

    @property
    def caption(self) -> str:
        return note_of(self.drawing)

    @property
    def height(self) -> int:
        """Pixels."""
        return int(self.drawing.layout.height or _HEIGHT)

    @property
    def needs_graphics_card(self) -> bool:
        return any(str(trace.type).endswith("gl") for trace in self.drawing.data)


def figures_of(view: StudyView) -> dict[str, ReportFigure]:
    """Returns the figures of the page by the id of their card, without those that lack data."""
    makers = {
        "pareto": _pareto,
        "ladder": _ablation,
        "memory": _memory,
        "roofline": _roofline,
        "predicted-speed": _predicted_speed,
    }
    found = {name: _or_none(make, view) for name, make in makers.items()}
    return {name: figure for name, figure in found.items() if figure is not None}


def _or_none(make: Callable[[StudyView], ReportFigure], view: StudyView) -> ReportFigure | None:
    try:
        return make(view)
    except InvalidInput:
        return None


def _pareto(view: StudyView) -> ReportFigure:
    return ReportFigure(
        alternative=_pareto_alternative(view),
        drawing=pareto_drawing.draw(pareto.compute(view)),
    )


def _ablation(view: StudyView) -> ReportFigure:
    figure = ablation.compute(view)
    rows = []
    for row in figure.rows:
        for cells in row.cells:
            if not cells.has_numbers:
                continue
            numbers = (cells.memory, cells.memory_share, cells.speed, cells.perplexity)
            rows.append((row.words, cells.how, *(text or BLANK for text in numbers), cells.source))
    without_numbers = [row for row in (*figure.rows, *figure.folded) if not row.has_numbers]
    for names, reason in ablation.by_reason(without_numbers):
        rows.append((names, *[BLANK] * 5, reason))
    return ReportFigure(
        alternative=f"Bars for {len(figure.rows)} values of techniques: how each changes memory, "
        f"speed and {figure.terms.quality}, alone, on top of the others, and over all pairs of "
        "trials. The table after it has the same numbers.",
        drawing=ablation.draw(figure),
        table=Table(
            caption="Effect of each value of a technique against the baseline's value",
            heads=("technique", "how", "memory", "share", "speed", figure.terms.quality, "from"),
            rows=tuple(rows),
        ),
    )


def _memory(view: StudyView) -> ReportFigure:
    figure = memory_at_peak.compute(view)
    largest = []
    for bar in figure.bars:
        segments = [(name.replace("_", " "), size) for name, size in bar.segments.items()]
        segments.sort(key=lambda segment: -segment[1])
        parts = [f"{name} {size:.4g} {figure.unit}" for name, size in segments[:3]]
        largest.append(f"trial {bar.number}: {', '.join(parts)}")
    categories = list(dict.fromkeys(name for bar in figure.bars for name in bar.segments))
    return ReportFigure(
        alternative=f"Stacked bars of {len(figure.bars)} trials. "
        f"Largest parts of each: {'; '.join(largest)}.",
        drawing=memory_at_peak.draw(figure),
        table=Table(
            caption=f"Memory at the peak by category, {figure.unit}",
            heads=("trial", *(name.replace("_", " ") for name in categories), "peak as measured"),
            rows=tuple(
                (
                    f"#{bar.number} {bar.words}",
                    *(
                        f"{bar.segments[name]:,.2f}" if name in bar.segments else BLANK
                        for name in categories
                    ),
                    BLANK if bar.measured_peak is None else f"{bar.measured_peak:,.2f}",
                )
                for bar in figure.bars
            ),
        ),
    )


def _roofline(view: StudyView) -> ReportFigure:
    figure = roofline.compute(view)
    rows = []
    for point in figure.points:
        found, record = point.found, view.result.trial(point.number)
        rows.append(
            (
                f"#{point.number} {trial_label(record)}",
                format_utilization(record),
                format_rate(found.flops_per_second, "FLOP"),
                format_rate(point.recomputed_per_second, "FLOP"),
                f"{found.flops_per_byte:.3g}",
                format_rate(found.attainable, "FLOP"),
            )
        )
    return ReportFigure(
        alternative=f"{len(figure.points)} trials by FLOPs per byte accessed and FLOPs per "
        f"second, under the rates of the device: memory {format_rate(figure.bandwidth, 'B')}, "
        + ", ".join(f"{kind} {format_rate(rate, 'FLOP')}" for kind, rate in figure.roofs.items())
        + ". The table after it has the same numbers.",
        drawing=roofline.draw(figure),
        table=Table(
            caption="Trials under the roofline",
            heads=("trial", "MFU", "speed", "recomputed", "FLOPs per byte", "roofline there"),
            rows=tuple(rows[:_MOST_ROWS]),
        ),
    )


def _predicted_speed(view: StudyView) -> ReportFigure:
    figure = predicted_speed.compute(view)
    rows = tuple(
        (
            f"#{point.number} {trial_label(view.result.trial(point.number))}",
            f"{point.predicted:,.0f}",
            f"{point.measured:,.0f}",
            f"{point.ratio:.2f}",
        )
        for point in figure.points[:_MOST_ROWS]
    )
    return ReportFigure(
        alternative=f"{figure.note} The table after it has the same numbers.",
        drawing=predicted.draw(figure),
        table=Table(
            caption="Tokens per second, predicted and measured",
            heads=("trial", "predicted", "measured", "measured over predicted"),
            rows=rows,
        ),
    )


_MOST_ROWS = 100
"""Of a table after a figure."""


def _pareto_alternative(view: StudyView) -> str:
    result = view.result
    measured = [
        record for record in result.trials if record.tokens_per_second and record.peak_memory_bytes
    ]
    memory = "Memory the device must have" if result.device.type == "cuda" else "Peak memory"
    parts = [
        f"{memory} against speed of {len(measured)} trials, "
        f"with the cap of {format_size(result.cap_bytes)}"
    ]
    front = [result.trial(number) for number in result.front[:12]]
    if front:
        parts.append("the front is " + ", ".join(map(_point, front)))
    if len(result.front) > len(front):
        parts.append(f"and {len(result.front) - len(front)} more")
    if view.pick is not None:
        parts.append(f"the pick is trial {view.pick.number}")
    if view.baseline is not None and view.baseline.tokens_per_second:
        parts.append(f"the baseline is {_point(view.baseline)}")
    return "; ".join(parts) + ". The table after it has the same numbers."


def _point(record: TrialRecord) -> str:
    memory = format_size(record.device_bytes or record.peak_memory_bytes or 0)
    speed = f"{record.tokens_per_second or 0:,.0f} {record.terms.speed_in_words}"
    return f"trial {record.number} with {memory} at {speed}"
