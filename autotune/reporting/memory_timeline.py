"""Who holds the memory over one training step: stacked categories over its allocations and frees, the peak marked."""

import html
from dataclasses import dataclass

import plotly.graph_objects as go

from autotune.prediction import CATEGORIES, Category, Prediction
from autotune.quantities import format_size
from autotune.reporting.html_page import whole_page

_COLORS: dict[Category, str] = {
    "parameters": "#1a73e8",
    "buffers": "#8ab4f8",
    "optimizer_state": "#5e35b1",
    "gradients": "#f9ab00",
    "activations": "#188038",
    "temporaries": "#d93025",
    "inputs": "#9aa0a6",
    "workspace": "#80868b",
}
_UNITS = {"GiB": 1024**3, "MiB": 1024**2, "KiB": 1024}


@dataclass(frozen=True, kw_only=True)
class TimelineFigure:
    """All that the picture shows, ready to draw; sizes in `unit`."""

    title: str
    about: str
    answer: str
    unit: str
    events: tuple[int, ...]
    layers: tuple[tuple[Category, tuple[float, ...]], ...]
    """From the bottom up; categories without bytes are left out."""
    phases: tuple[tuple[str, int, int], ...]
    peak_event: int
    peak: float
    cap: float | None
    holders: tuple[str, ...]


def compute(
    prediction: Prediction, *, title: str, about: str, answer: str, cap_bytes: int | None = None
) -> TimelineFigure:
    """The figure of a prediction that was made with its timeline."""
    timeline = prediction.timeline
    assert timeline is not None, "predict with_timeline=True"
    unit, divisor = next((u, d) for u, d in _UNITS.items() if prediction.peak_memory_bytes >= d or u == "KiB")
    constant = prediction.bytes_by_category["workspace"]
    layers = []
    for category in CATEGORIES:
        sizes = timeline.bytes_by_category[category]
        if category == "workspace":
            sizes = tuple(constant for _ in sizes)
        if any(sizes):
            layers.append((category, tuple(size / divisor for size in sizes)))
    return TimelineFigure(
        title=title,
        about=about,
        answer=answer,
        unit=unit,
        events=timeline.events,
        layers=tuple(layers),
        phases=timeline.phases,
        peak_event=timeline.peak_event,
        peak=prediction.peak_memory_bytes / divisor,
        cap=None if cap_bytes is None else cap_bytes / divisor,
        holders=tuple(
            f"{format_size(holder.size_bytes)} in {holder.count}: {holder.category.replace('_', ' ')}, "
            f"{holder.module or 'outside modules'}, {holder.operator}"
            for holder in prediction.holders
        ),
    )


def draw(figure: TimelineFigure) -> go.Figure:
    drawing = go.Figure()
    for category, sizes in figure.layers:
        drawing.add_trace(
            go.Scatter(
                x=figure.events,
                y=sizes,
                name=category.replace("_", " "),
                stackgroup="memory",
                mode="lines",
                line={"width": 0.5, "color": _COLORS[category], "shape": "hv"},
                hovertemplate="%{y:.4g} " + figure.unit,
            )
        )
    for number, (name, first, last) in enumerate(figure.phases):
        drawing.add_vrect(
            x0=first,
            x1=max(last, first + 1),
            fillcolor="#5f6368",
            opacity=0.05 if number % 2 else 0.11,
            line_width=0,
            annotation_text=name if last > first else None,
            annotation_position="top left",
        )
    drawing.add_annotation(
        x=figure.peak_event, y=figure.peak, text=f"peak {figure.peak:.4g} {figure.unit}", arrowcolor="#d93025", ay=-32
    )
    if figure.cap is not None:
        drawing.add_hline(y=figure.cap, line={"color": "#d93025", "dash": "dash"}, annotation_text="cap")
    drawing.update_layout(
        template="plotly_white",
        xaxis={"title": "allocations and frees of one step, in order"},
        yaxis={"title": f"live memory, {figure.unit}", "rangemode": "tozero"},
        legend={"traceorder": "reversed"},
        hovermode="x unified",
        margin={"t": 40, "r": 20},
    )
    return drawing


def page(figure: TimelineFigure) -> str:
    """The figure and the largest holders at the peak as one HTML page."""
    rows = "".join(f"<li>{html.escape(line)}</li>" for line in figure.holders)
    return whole_page(
        figure.title,
        about=figure.about,
        answer=figure.answer,
        drawing=draw(figure),
        below=f"<p>Largest at the peak:</p><ul>{rows}</ul>",
    )
