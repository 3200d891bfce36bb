"""Memory over one training step: categories stacked over allocations and frees, with the peak."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import plotly.graph_objects as go

from autotune.errors import InvalidInput
from autotune.reporting import style
from autotune.reporting.figures import FigureOptions
from autotune.reporting.figures.memory_at_peak import trial_of
from autotune.reporting.html_page import whole_page
from autotune.reporting.html_text import html_text
from autotune.reporting.study_view import StudyView
from autotune.reporting.trial_text import trial_label
from autotune.spec.prediction import CATEGORIES, Category, Holder, Prediction, Timeline
from autotune.spec.result import TrialRecord
from autotune.units import format_size


@dataclass(frozen=True, kw_only=True)
class TimelineFigure:
    """All data of the figure, ready to draw; sizes in `unit`."""

    title: str
    about: str
    answer: str
    unit: style.Unit
    events: tuple[int, ...]
    layers: tuple[tuple[Category, tuple[float, ...]], ...]
    """Categories and their sizes, from the bottom up, without empty categories."""
    phases: tuple[tuple[str, int, int], ...]
    peak_event: int
    peak: float
    cap: float | None
    holders: tuple[str, ...]
    note: str = ""


def compute(
    prediction: Prediction, *, title: str, about: str, answer: str, cap_bytes: int | None = None
) -> TimelineFigure:
    """Compute the figure of a prediction that was made with its timeline."""
    assert prediction.timeline is not None, "predict with_timeline=True"
    return compute_of_step(
        prediction.timeline,
        peak_memory_bytes=prediction.peak_memory_bytes,
        workspace_bytes=prediction.bytes_by_category["workspace"],
        holders=prediction.holders,
        title=title,
        about=about,
        answer=answer,
        cap_bytes=cap_bytes,
    )


def compute_of_step(
    timeline: Timeline,
    *,
    peak_memory_bytes: int,
    workspace_bytes: int,
    holders: Sequence[Holder],
    title: str,
    about: str,
    answer: str,
    cap_bytes: int | None = None,
) -> TimelineFigure:
    """Compute the figure of a predicted or a profiled step; `workspace_bytes` are always there."""
    unit = style.unit_for(peak_memory_bytes)
    layers = []
    for category in CATEGORIES:
        sizes = timeline.bytes_by_category.get(category, ())  # an earlier release had fewer
        if category == "workspace":
            sizes = tuple(workspace_bytes for _ in sizes)
        if any(sizes):
            layers.append((category, tuple(unit.of(size) for size in sizes)))
    return TimelineFigure(
        title=title,
        about=about,
        answer=answer,
        unit=unit,
        events=timeline.events,
        layers=tuple(layers),
        phases=timeline.phases,
        peak_event=timeline.peak_event,
        peak=unit.of(peak_memory_bytes),
        cap=None if cap_bytes is None else unit.of(cap_bytes),
        holders=tuple(
            f"{format_size(holder.size_bytes)} in {holder.count}: "
            f"{holder.category.replace('_', ' ')}, {holder.module or 'outside modules'}, "
            f"{holder.operator}"
            for holder in holders
        ),
    )


def compute_of_trial(
    view: StudyView, prediction: Prediction | None, *, number: int | None
) -> TimelineFigure:
    """Compute the figure of a trial, by default the pick.

    Raises InvalidInput if the prediction has no timeline.
    """
    record = trial_shown(view, number)
    if prediction is None or prediction.timeline is None:
        raise InvalidInput(
            f"the timeline of trial {record.number} needs a prediction with its timeline",
            hint=f"use autotune plot {view.result.study} timeline --trial {record.number}",
        )
    measured = (
        f", measured {format_size(record.peak_memory_bytes)}" if record.peak_memory_bytes else ""
    )
    note = (
        f"#{record.number} {trial_label(record)}: predicted peak "
        f"{format_size(prediction.peak_memory_bytes)}, in {prediction.phase}{measured}."
    )
    cap_bytes = view.result.cap_bytes if view.result.device.type != "cuda" else None
    figure = compute(
        prediction, title=f"#{record.number}", about="", answer=note, cap_bytes=cap_bytes
    )
    return replace(figure, note=note)


def trial_shown(view: StudyView, number: int | None) -> TrialRecord:
    """Returns trial `number`, or the pick if it is None. Raises InvalidInput if there is none."""
    if number is not None:
        return trial_of(view, number)
    if view.pick is None:
        raise InvalidInput(
            f"study {view.result.study!r} has no pick to show", hint="name a trial with --trial"
        )
    return view.pick


def plot(view: StudyView, options: FigureOptions) -> go.Figure:
    """Compute the figure of a study and draw it."""
    return draw(compute_of_trial(view, options.prediction, number=options.trial))


def draw(figure: TimelineFigure) -> go.Figure:
    """Draw stacked areas over the step, its phases in the background, and the peak."""
    drawing = style.styled(go.Figure(), note=figure.note)
    for category, sizes in figure.layers:
        drawing.add_trace(
            go.Scatter(
                x=figure.events,
                y=sizes,
                name=category.replace("_", " "),
                stackgroup="memory",
                mode="lines",
                line={"width": 0.5, "color": style.CATEGORY_COLORS[category], "shape": "hv"},
                fillpattern={
                    "shape": style.CATEGORY_PATTERNS[category],
                    "fillmode": "overlay",
                    "solidity": 0.2,
                },
                text=[format_size(size * figure.unit.size_bytes) for size in sizes],
                hovertemplate="%{text}",
            )
        )
    for number, phase in enumerate(figure.phases):
        _shade(drawing, number, phase)
    drawing.add_annotation(
        x=figure.peak_event,
        y=figure.peak,
        text=f"peak {figure.peak:.4g} {figure.unit.name}",
        arrowcolor=style.VERMILLION,
        ay=-32,
    )
    if figure.cap is not None:
        drawing.add_hline(
            y=figure.cap,
            line={"color": style.VERMILLION, "dash": "dash"},
            annotation_text=f"cap {figure.cap:.4g} {figure.unit.name}",
        )
    highest = max(figure.peak, figure.cap or 0.0)
    drawing.update_layout(
        xaxis={"title": "allocations and frees, in order"},
        yaxis={"title": f"live memory, {figure.unit.name}", "range": [0, 1.2 * highest]},
        legend={"traceorder": "reversed", "orientation": "v", "x": 1.02, "y": 1, "yanchor": "top"},
        hovermode="x unified",
    )
    style.on_narrow_screens(
        drawing, {f"legend.{key}": value for key, value in _LEGEND_BELOW.items()}
    )
    return drawing


_LEGEND_BELOW = {"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top"}


def _shade(drawing: go.Figure, number: int, phase: tuple[str, int, int]) -> None:
    name, first, last = phase
    drawing.add_vrect(
        x0=first,
        x1=max(last, first + 1),
        fillcolor=style.GREY,
        opacity=0.08 if number % 2 else 0.18,
        line_width=0,
        annotation_text=name if last > first else None,
        annotation_position="top left",
    )


def page(figure: TimelineFigure) -> str:
    """Returns an HTML page with the figure and the largest holders of memory at the peak."""
    rows = "".join(f"<li>{html_text(line)}</li>" for line in figure.holders)
    return whole_page(
        figure.title,
        about=figure.about,
        answer=figure.answer,
        drawing=draw(figure),
        below=f"<p>Largest at the peak:</p><ul>{rows}</ul>",
    )
