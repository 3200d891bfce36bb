"""Draws the figure of `pareto.py` in 3D, to be turned with the mouse."""

from collections.abc import Sequence

import plotly.graph_objects as go

from autotune.reporting import style
from autotune.reporting.figures.pareto import Mark, ParetoFigure, colour_scale


def draw(figure: ParetoFigure) -> go.Figure:
    """Draw x and y as in 2D, and the third objective as both height and colour."""
    drawing = style.styled(go.Figure(), note=f"{figure.note} Drag to turn, scroll to zoom.".strip())
    marks = [mark for mark in figure.marks if mark.colour is not None]
    feasible = [mark for mark in marks if mark.feasible]
    groups = (
        (
            "not feasible",
            [m for m in marks if not m.feasible],
            {"color": style.GREY, "symbol": "cross", "size": 4},
        ),
        (
            "dominated",
            [m for m in feasible if not m.on_front],
            {"symbol": "circle", "size": 4, "opacity": 0.5},
        ),
        ("front", [m for m in feasible if m.on_front], {"symbol": "diamond", "size": 6}),
        ("pick", [m for m in marks if m.number == figure.pick], _ring("diamond-open")),
        ("baseline", [m for m in marks if m.number == figure.baseline], _ring("square-open")),
    )
    for name, members, marker in groups:
        if "color" not in marker:
            marker["color"] = [mark.colour for mark in members]
            marker["coloraxis"] = "coloraxis"
        trace = _points(members, name=name, marker=marker)
        drawing.add_trace(trace)
        if not members:
            drawing.data[-1].showlegend = False
        elif "coloraxis" in marker:
            drawing.add_trace(style.grey_key(drawing.data[-1]))
    if figure.cap_axis == "x" and marks:
        drawing.add_trace(_wall(figure, marks))
    axes = {
        "xaxis": {"title": figure.x.title},
        "yaxis": {"title": figure.y.title},
        "zaxis": {"title": figure.colour.title},
    }
    drawing.update_layout(
        scene=go.layout.Scene(axes, camera={"eye": {"x": 1.7, "y": -1.8, "z": 0.9}}),
        legend=style.LEGEND_ABOVE,
        coloraxis=colour_scale(feasible, title=figure.colour.title),
    )
    return drawing


def _ring(symbol: str) -> dict[str, object]:
    return {"symbol": symbol, "size": 10, "color": style.VERMILLION, "line": {"width": 3}}


def _points(marks: Sequence[Mark], *, name: str, marker: dict[str, object]) -> go.Scatter3d:
    return go.Scatter3d(
        x=[mark.x for mark in marks],
        y=[mark.y for mark in marks],
        z=[mark.colour for mark in marks],
        mode="markers",
        name=name,
        marker=marker,
        customdata=[mark.hover for mark in marks],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _wall(figure: ParetoFigure, marks: Sequence[Mark]) -> go.Mesh3d:
    """Returns the cap as a plane."""
    low, high = min(m.y for m in marks), max(m.y for m in marks)
    bottom, top = min(m.colour or 0.0 for m in marks), max(m.colour or 0.0 for m in marks)
    return go.Mesh3d(
        x=[figure.cap] * 4,
        y=[low, high, high, low],
        z=[bottom, bottom, top, top],
        i=[0, 0],
        j=[1, 2],
        k=[2, 3],
        color=style.VERMILLION,
        opacity=0.15,
        name=figure.cap_words,
        showlegend=True,
        hoverinfo="skip",
    )
