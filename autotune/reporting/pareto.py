"""Memory against speed: what was measured, the cap, the front and the pick, in one page that opens offline."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from autotune.quantities import format_size
from autotune.recommendation.pick import savings
from autotune.reporting.html_page import whole_page
from autotune.result import StudyResult, TrialRecord

_UNITS = {"GiB": 1024**3, "MiB": 1024**2, "KiB": 1024}


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One trial in the picture."""

    number: int
    memory: float
    """Device bytes in the figure's unit: what the cap is held against."""
    tokens_per_second: float
    spread: float
    perplexity: float
    on_front: bool
    feasible: bool
    hover: str


@dataclass(frozen=True, kw_only=True)
class ParetoFigure:
    """All that the picture shows, ready to draw."""

    study: str
    subtitle: str
    answer: str
    unit: str
    cap: float
    memory_is: str
    """What the horizontal axis measures, in words."""
    marks: tuple[Mark, ...]
    not_timed: tuple[tuple[float, str], ...]
    """Memory and hover text of trials over the cap, which were stopped before they had a speed."""
    without_numbers: tuple[str, ...]
    """Trials that ended before they had a speed, in words."""
    pick: int | None
    baseline: int | None


def compute(result: StudyResult) -> ParetoFigure:
    baseline = next((record for record in result.trials if record.number == result.baseline), None)
    unit, divisor = next((u, d) for u, d in _UNITS.items() if result.cap_bytes >= d or u == "KiB")
    drawn = [r for r in result.trials if r.device_bytes and r.tokens_per_second and r.perplexity]
    undrawn = [record for record in result.trials if record not in drawn]
    device = f"{result.device.device} ({result.device.name})"
    workload = result.workload
    return ParetoFigure(
        study=result.study,
        subtitle=f"{workload.describe()}, {workload.steps} steps, on {device}, "
        f"torch {result.device.versions.get('torch', '?')}",
        answer=_answer(result),
        unit=unit,
        cap=result.cap_bytes / divisor,
        memory_is="memory the device must have" if result.device.type == "cuda" else "peak memory",
        marks=tuple(_mark(record, result, baseline, divisor) for record in drawn),
        not_timed=tuple((r.device_bytes / divisor, _hover(r, baseline)) for r in undrawn if r.device_bytes),
        without_numbers=tuple(_in_words(record) for record in undrawn),
        pick=None if result.pick is None else result.pick.number,
        baseline=result.baseline,
    )


def _answer(result: StudyResult) -> str:
    if result.pick is None:
        return f"Nothing that was tried trains under {format_size(result.cap_bytes)}."
    picked = result.trial(result.pick.number)
    return f"Pick: #{picked.number} {_describe(picked)} - {result.pick.reason}."


def _mark(record: TrialRecord, result: StudyResult, baseline: TrialRecord | None, divisor: int) -> Mark:
    return Mark(
        number=record.number,
        memory=(record.device_bytes or 0) / divisor,
        tokens_per_second=record.tokens_per_second or 0.0,
        spread=record.tokens_per_second_spread or 0.0,
        perplexity=record.perplexity or 0.0,
        on_front=record.number in result.front,
        feasible=record.feasible,
        hover=_hover(record, baseline),
    )


def _hover(record: TrialRecord, baseline: TrialRecord | None) -> str:
    lines = [f"<b>#{record.number} {html.escape(record.name or '')}</b>"]
    lines += [f"{field.replace('_', ' ')}: {value}" for field, value in record.config.to_dict().items()]
    lines += [
        f"peak memory: {format_size(record.peak_memory_bytes or 0)}, in {record.peak_phase}",
        f"on the device: {format_size(record.device_bytes or 0)}",
    ]
    if record.tokens_per_second is not None:
        spread = record.tokens_per_second_spread or 0.0
        lines.append(f"tokens/s: {record.tokens_per_second:,.0f} ± {spread:,.0f}")
    if record.perplexity is not None:
        lines.append(f"perplexity: {record.perplexity:.3f}")
    if record.compile_seconds is not None:
        lines.append(f"compiled in {record.compile_seconds:.1f} s")
    if record.outcome != "ok":
        lines.append(html.escape(f"{record.outcome.replace('_', ' ')}: {record.message}"))
    if against := savings(record, baseline).removeprefix("; "):
        lines.append(against)
    return "<br>".join(lines)


def _in_words(record: TrialRecord) -> str:
    size = f" at {format_size(record.device_bytes)}" if record.device_bytes else ""
    reason = "" if record.outcome == "over_cap" or not record.message else f" ({record.message})"
    return f"#{record.number} {_describe(record)}: {record.outcome.replace('_', ' ')}{size}{reason}"


def _describe(record: TrialRecord) -> str:
    return (f"{record.name}: " if record.name else "") + record.config.describe()


def draw(figure: ParetoFigure) -> go.Figure:
    """Feasible trials in the colour of their perplexity, the others grey; front as a line, pick as a star."""
    drawing = go.Figure()
    feasible = [mark for mark in figure.marks if mark.feasible]
    others = [mark for mark in figure.marks if not mark.feasible]
    front = sorted((mark for mark in feasible if mark.on_front), key=lambda mark: mark.memory)
    # Along the front memory only grows; the line follows the fastest seen so far and skips those kept for perplexity.
    fastest = [m for i, m in enumerate(front) if all(m.tokens_per_second > o.tokens_per_second for o in front[:i])]
    drawing.add_trace(_line(fastest))
    drawing.add_trace(_points(others, name="not feasible", color="#9aa0a6", size=8, symbol="x-thin-open"))
    drawing.add_trace(_points([m for m in feasible if not m.on_front], name="dominated", size=9, opacity=0.55))
    drawing.add_trace(_points(front, name="front", size=14, labels=True))
    drawing.add_trace(_ticks(figure.not_timed))
    for number, name, symbol in ((figure.pick, "pick", "star-open"), (figure.baseline, "baseline", "square-open")):
        marked = [mark for mark in figure.marks if mark.number == number]
        drawing.add_trace(_points(marked, name=name, color="#d93025", size=24, symbol=symbol, hover=False))
    _mark_the_cap(drawing, figure)
    drawing.update_layout(
        template="plotly_white",
        xaxis={"title": f"{figure.memory_is}, {figure.unit}", "rangemode": "tozero"},
        yaxis={"title": "tokens per second (median ± half the interquartile range)", "rangemode": "tozero"},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        margin={"t": 40, "r": 20},
        hoverlabel={"align": "left"},
        coloraxis={**_colour_range(figure.marks), "reversescale": True, "colorbar": {"title": "perplexity"}},
    )
    return drawing


def _colour_range(marks: Sequence[Mark]) -> dict[str, object]:
    """Spans at least 2 %, so that noise does not look like a difference."""
    perplexities = [mark.perplexity for mark in marks] or [1.0]
    lowest = min(perplexities)
    return {"colorscale": "Viridis", "cmin": lowest, "cmax": max(max(perplexities), 1.02 * lowest)}


def _ticks(not_timed: Sequence[tuple[float, str]]) -> go.Scatter:
    """Trials without a speed, as ticks on the memory axis."""
    return go.Scatter(
        x=[memory for memory, _ in not_timed],
        y=[0.0 for _ in not_timed],
        mode="markers",
        name="over the cap, not timed",
        marker={"symbol": "line-ns-open", "size": 14, "color": "#d93025", "line": {"width": 2}},
        text=[hover for _, hover in not_timed],
        hovertemplate="%{text}<extra></extra>",
        cliponaxis=False,
    )


def _line(marks: Sequence[Mark]) -> go.Scatter:
    return go.Scatter(
        x=[mark.memory for mark in marks],
        y=[mark.tokens_per_second for mark in marks],
        mode="lines",
        line={"shape": "hv", "color": "#5f6368", "width": 1.5},
        hoverinfo="skip",
        showlegend=False,
    )


def _points(
    marks: Sequence[Mark],
    *,
    name: str,
    size: int,
    color: str | None = None,
    symbol: str = "circle",
    opacity: float = 1.0,
    hover: bool = True,
    labels: bool = False,
) -> go.Scatter:
    """Markers at `marks`, in the colour of their perplexity unless `color` is given."""
    colouring = {"color": color} if color else {"color": [mark.perplexity for mark in marks], "coloraxis": "coloraxis"}
    return go.Scatter(
        x=[mark.memory for mark in marks],
        y=[mark.tokens_per_second for mark in marks],
        error_y={"array": [mark.spread for mark in marks], "thickness": 1, "width": 2} if hover else None,
        mode="markers+text" if labels else "markers",
        textposition="top left",
        name=name,
        marker={"size": size, "symbol": symbol, "opacity": opacity, "line": {"width": 2 if color else 0}, **colouring},
        text=[f"#{mark.number}" for mark in marks] if labels else None,
        customdata=[mark.hover for mark in marks],
        hovertemplate="%{customdata}<extra></extra>" if hover else None,
        hoverinfo=None if hover else "skip",
    )


def _mark_the_cap(drawing: go.Figure, figure: ParetoFigure) -> None:
    right = 1.05 * max([figure.cap, *(m.memory for m in figure.marks), *(memory for memory, _ in figure.not_timed)])
    drawing.add_vrect(x0=0, x1=figure.cap, fillcolor="#188038", opacity=0.06, line_width=0, layer="below")
    drawing.add_vline(x=figure.cap, line={"color": "#d93025", "dash": "dash", "width": 1.5})
    drawing.add_annotation(
        x=figure.cap, y=1, yref="paper", text=f"cap {figure.cap:g} {figure.unit}", showarrow=False, xanchor="left"
    )
    drawing.update_xaxes(range=[0, right])


def page(figure: ParetoFigure) -> str:
    """The figure as one HTML page."""
    without = "".join(f"<li>{html.escape(line)}</li>" for line in figure.without_numbers)
    summary = f"<summary>Ended without a speed: {len(figure.without_numbers)}</summary>"
    return whole_page(
        figure.study,
        about=figure.subtitle,
        answer=figure.answer,
        drawing=draw(figure),
        below=f"<details>{summary}<ul>{without}</ul></details>" if without else "",
    )
