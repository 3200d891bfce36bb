"""Draws the figure of `pareto.py` in 2D: trials, front, cap, pick and baseline."""

from collections.abc import Iterable, Sequence

import plotly.graph_objects as go

from autotune.reporting import style
from autotune.reporting.figures import FigureOptions, pareto_space
from autotune.reporting.figures.pareto import Mark, ParetoFigure, colour_scale, compute
from autotune.reporting.study_view import StudyView

LABELLED = 16
"""On a front of more trials the marks have no numbers, which would cover each other."""
_NUMBERS = "numbers"


def plot(view: StudyView, options: FigureOptions) -> go.Figure:
    """Compute the figure of a study and draw it in 2D or 3D."""
    figure = compute(view, x=options.x, y=options.y)
    return pareto_space.draw(figure) if options.three_d else draw(figure)


def draw(figure: ParetoFigure) -> go.Figure:
    """Draw feasible trials in the colour of the third objective and the others in grey.

    The front is a line, the pick a star.
    """
    note = figure.note
    if figure.not_timed:
        note = f"{note} Ticks at the bottom: memory of trials that were not timed.".strip()
    drawing = style.styled(go.Figure(), note=note)
    feasible = [mark for mark in figure.marks if mark.feasible]
    others = [mark for mark in figure.marks if not mark.feasible]
    front = [mark for mark in feasible if mark.on_front]
    dominated = [mark for mark in feasible if not mark.on_front]
    drawing.add_trace(_line(figure.front_line))
    drawing.add_trace(
        _points(figure, others, name="not feasible", color=style.GREY, size=8, symbol="x-thin-open")
    )
    drawing.add_trace(_points(figure, dominated, name="dominated", size=8, opacity=0.5))
    drawing.add_trace(_points(figure, front, name="front", size=14, symbol="diamond"))
    if len(front) <= LABELLED:
        drawing.add_trace(_labels(front, pick=figure.pick))
    if figure.not_timed:
        drawing.add_trace(_ticks(figure.not_timed))
    pick = [mark for mark in figure.marks if mark.number == figure.pick]
    baseline = [mark for mark in figure.marks if mark.number == figure.baseline]
    drawing.add_trace(_marked(pick, name="pick", symbol="star", size=22, is_coloured=True))
    drawing.add_trace(_marked(baseline, name="baseline", symbol="square-open", size=20))
    for trace in list(drawing.data):
        if not trace.x:
            trace.showlegend = False  # no legend entry for what is not shown
        elif trace.marker.coloraxis is not None:
            drawing.add_trace(style.grey_key(trace))
    drawing.update_layout(
        xaxis={"title": figure.x.title},
        yaxis={"title": figure.y.title},
        legend=style.LEGEND_ABOVE,
        coloraxis=colour_scale(feasible, title=figure.colour.title),
    )
    _set_ranges(drawing, figure)
    _mark_the_cap(drawing, figure)
    style.hide_on_narrow_screens(drawing, _NUMBERS)
    return drawing


def _line(corners: Sequence[tuple[float, float]]) -> go.Scatter:
    return go.Scatter(
        x=[x for x, _ in corners],
        y=[y for _, y in corners],
        mode="lines",
        line={"shape": "hv", "color": style.GREY, "width": 1.5},
        hoverinfo="skip",
        showlegend=False,
        name="front line",
    )


def _points(
    figure: ParetoFigure,
    marks: Sequence[Mark],
    *,
    name: str,
    size: int,
    symbol: str = "circle",
    color: str | None = None,
    opacity: float = 1.0,
) -> go.Scatter | go.Scattergl:
    """Returns marks in the colour of the third objective, or in `color`."""
    colouring: dict[str, object] = {"color": color}
    if color is None:
        colours = _short(mark.colour or 0.0 for mark in marks)
        colouring = {"color": colours, "coloraxis": "coloraxis"}
    is_lean = figure.is_large and name != "front"
    scatter = go.Scattergl if is_lean else go.Scatter
    return scatter(
        x=_short(mark.x for mark in marks),
        y=_short(mark.y for mark in marks),
        error_x=None if is_lean else _bars(mark.spread_x for mark in marks),
        error_y=None if is_lean else _bars(mark.spread_y for mark in marks),
        mode="markers",
        name=name,
        marker={
            "size": size,
            "symbol": symbol,
            "opacity": opacity,
            "line": {"width": 1, "color": style.GREY},
            **colouring,
        },
        customdata=[mark.hover for mark in marks],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _bars(spreads: Iterable[float]) -> dict[str, object] | None:
    array = _short(spreads)
    if not any(array):
        return None
    return {"array": array, "thickness": 1, "width": 2, "color": style.GREY}


def _short(values: Iterable[float]) -> list[float]:
    """Round to six digits: more would only make the file larger."""
    return [float(f"{value:.6g}") for value in values]


def _marked(
    marks: Sequence[Mark], *, name: str, symbol: str, size: int, is_coloured: bool = False
) -> go.Scatter:
    """Returns a symbol around some marks; its hover text is that of the mark itself."""
    fill: dict[str, object] = {"color": style.VERMILLION}
    if is_coloured:
        fill = {"color": [mark.colour for mark in marks], "coloraxis": "coloraxis"}
    return go.Scatter(
        x=[mark.x for mark in marks],
        y=[mark.y for mark in marks],
        mode="markers",
        name=name,
        marker={
            "symbol": symbol,
            "size": size,
            "line": {"width": 2.5, "color": style.VERMILLION},
            **fill,
        },
        hoverinfo="skip",
    )


def _labels(marks: Sequence[Mark], *, pick: int | None) -> go.Scatter:
    """Returns the numbers of marks. Invisible marks of the same size keep them at a distance."""
    return go.Scatter(
        x=[mark.x for mark in marks],
        y=[mark.y for mark in marks],
        mode="markers+text",
        marker={
            "size": [24 if mark.number == pick else 14 for mark in marks],
            "opacity": 0,
            "color": style.GREY,
        },
        text=[f"#{mark.number}" for mark in marks],
        textposition="top left",
        textfont={"size": 11},
        name=_NUMBERS,
        legendgroup="front",
        showlegend=False,
        hoverinfo="skip",
        cliponaxis=False,
    )


def _ticks(not_timed: Sequence[tuple[float, str]]) -> go.Scatter:
    """Returns trials without a speed, as ticks on the memory axis."""
    return go.Scatter(
        x=[memory for memory, _ in not_timed],
        y=[0.0 for _ in not_timed],
        mode="markers",
        name="not timed",
        marker={
            "symbol": "line-ns-open",
            "size": 14,
            "color": style.VERMILLION,
            "line": {"width": 2},
        },
        text=[hover for _, hover in not_timed],
        hovertemplate="%{text}<extra></extra>",
        cliponaxis=False,
    )


def _set_ranges(drawing: go.Figure, figure: ParetoFigure) -> None:
    """Start the axes of memory and speed at zero, where lengths are shares, but not perplexity."""
    for position, axis, values in (
        (
            "x",
            figure.x,
            [*(m.x + m.spread_x for m in figure.marks), *(x for x, _ in figure.not_timed)],
        ),
        ("y", figure.y, [m.y + m.spread_y for m in figure.marks]),
    ):
        if axis.name == "perplexity":
            drawing.update_layout({f"{position}axis": {"rangemode": "normal"}})
            continue
        if figure.cap_axis == position:
            values.append(figure.cap)
        highest = max(values, default=0.0) or 1.0
        drawing.update_layout({f"{position}axis": {"range": [0, 1.06 * highest]}})


def _mark_the_cap(drawing: go.Figure, figure: ParetoFigure) -> None:
    """Draw the cap as a dashed line and shade what is beyond it."""
    beyond = {"fillcolor": style.VERMILLION, "opacity": 0.09, "line_width": 0, "layer": "below"}
    line = {"color": style.VERMILLION, "dash": "dash", "width": 1.5}
    if figure.cap_axis == "x":
        drawing.add_vrect(x0=figure.cap, x1=drawing.layout.xaxis.range[1], **beyond)
        drawing.add_vline(x=figure.cap, line=line)
        position = {"x": figure.cap, "y": 1, "yref": "paper", "xanchor": "right", "yanchor": "top"}
    elif figure.cap_axis == "y":
        drawing.add_hrect(y0=figure.cap, y1=drawing.layout.yaxis.range[1], **beyond)
        drawing.add_hline(y=figure.cap, line=line)
        position = {"y": figure.cap, "x": 1, "xref": "paper", "xanchor": "right", "yanchor": "top"}
    else:
        return
    drawing.add_annotation(text=figure.cap_words, showarrow=False, **position)
