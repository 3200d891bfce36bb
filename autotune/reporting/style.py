"""How all figures look: units, colours that colour-blind people can tell apart, shapes, light and dark, narrow screens.

A figure has no background of its own and takes its text and grid from a template, so that a page
can exchange `LIGHT` for `DARK` when the reader's colour scheme changes (`SCREEN_SCRIPT` does).
Colours of marks stand out on both.
"""

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from autotune.spec.prediction import Category

if TYPE_CHECKING:
    import plotly.graph_objects as go

# Okabe and Ito's palette, without its yellow, which white paper swallows.
BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#56b4e9",
)
GREY = "#8a8a8a"
"""Readable on white and on black: lines, error bars, what is not feasible."""
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, VERMILLION, SKY)
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "hexagon")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""One each for the things a figure compares, so that nothing is told by colour alone."""

SCALE = ((0.0, "#f2b632"), (0.35, "#e0705b"), (0.7, "#b0479a"), (1.0, "#6c55c8"))
"""For a number as a colour, low to high. Neither end is lost on white or on black, as those of
Viridis are."""

CATEGORY_COLORS: Mapping[Category | str, str] = {
    "parameters": BLUE,
    "buffers": SKY,
    "optimizer_state": PURPLE,
    "gradients": ORANGE,
    "activations": GREEN,
    "temporaries": VERMILLION,
    "inputs": "#b5a642",
    "workspace": GREY,
}
CATEGORY_PATTERNS: Mapping[Category | str, str] = {
    "parameters": "",
    "buffers": ".",
    "optimizer_state": "/",
    "gradients": "\\",
    "activations": "",
    "temporaries": "x",
    "inputs": "|",
    "workspace": "-",
}
OTHER = "rest"
"""Bytes of a peak that nobody attributed."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A binary unit of memory and its bytes."""

    name: str
    size_bytes: int

    def of(self, size_bytes: float) -> float:
        return size_bytes / self.size_bytes


_UNITS = tuple(
    Unit(name=name, size_bytes=1024**power) for name, power in (("GiB", 3), ("MiB", 2), ("KiB", 1))
)


def unit_for(size_bytes: float) -> Unit:
    """The largest unit of which `size_bytes` is at least one."""
    return next((unit for unit in _UNITS if size_bytes >= unit.size_bytes), _UNITS[-1])


# -- light and dark --------------------------------------------------------------------------------


def _template(*, text: str, grid: str, zero: str) -> dict[str, Any]:
    lines = {"gridcolor": grid, "zerolinecolor": zero, "linecolor": zero, "zerolinewidth": 1}
    axis, box = {**lines, "automargin": True}, {**lines, "showbackground": False}
    return {
        "layout": {
            "font": {
                "color": text,
                "family": "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif",
                "size": 13,
            },
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "colorway": list(PALETTE),
            "xaxis": axis,
            "yaxis": axis,
            "scene": {"xaxis": box, "yaxis": box, "zaxis": box},
            "hoverlabel": {"align": "left", "namelength": -1},
            "annotationdefaults": {"arrowcolor": zero},
            "coloraxis": {"colorbar": {"outlinewidth": 0, "thickness": 12}},
            "legend": {"bgcolor": "rgba(0,0,0,0)"},
        }
    }


LIGHT = _template(text="#202124", grid="#e3e5e8", zero="#9aa0a6")
DARK = _template(text="#e8eaed", grid="#3c4043", zero="#80868b")
"""Templates: `Plotly.relayout(div, {template: DARK})` turns a drawn figure."""

NARROW_SCREEN = "45rem"
LEGEND_ABOVE = {"orientation": "h", "x": 0, "y": 1.01, "yanchor": "bottom"}


def empty_figure(*, note: str = "", panels: "go.Figure | None" = None) -> "go.Figure":
    """A figure in our template; `note` is the sentence a page puts above it and a picture on top of it.

    `panels` is what `make_subplots` gives.
    """
    import plotly.graph_objects as go

    drawing = go.Figure() if panels is None else panels
    drawing.update_layout(
        template=LIGHT, margin={"t": 30, "r": 16, "b": 50, "l": 16}, meta={"note": note}
    )
    return drawing


def note_of(drawing: "go.Figure") -> str:
    """What has to be said beside a figure, as plain text; empty where nothing has."""
    return str((drawing.layout.meta or {}).get("note", ""))


def on_narrow_screens(
    drawing: "go.Figure", changes: Mapping[str, Any], *, least_width: int | None = None
) -> None:
    """`changes` of the layout for a phone, and the way back; below `least_width` pixels a page scrolls the figure."""
    before = {path: _plain(drawing.layout[path]) for path in changes}
    meta = {**(drawing.layout.meta or {}), "narrow": dict(changes), "wide": before}
    drawing.update_layout(
        meta=meta if least_width is None else {**meta, "least_width": least_width}
    )


def hide_on_narrow_screens(drawing: "go.Figure", *names: str) -> None:
    """Traces, such as labels, for which a phone has no room."""
    places = [place for place, trace in enumerate(drawing.data) if trace.name in names]
    drawing.update_layout(meta={**(drawing.layout.meta or {}), "wide_only": places})


def grey_key(trace: Any) -> Any:
    """The legend's entry for marks of many colours, whose own would be black, on dark pages too."""
    trace.update(showlegend=False, legendgroup=trace.name)
    look = {"symbol": trace.marker.symbol, "size": min(trace.marker.size, 14), "color": GREY}
    places = {axis: [None] for axis in "xyz" if axis in trace}
    marker = {**look, "line": trace.marker.line.to_plotly_json()}
    return type(trace)(
        **places, mode="markers", name=trace.name, legendgroup=trace.name, marker=marker
    )


def _plain(value: Any) -> Any:
    return value.to_plotly_json() if hasattr(value, "to_plotly_json") else value


SCREEN_SCRIPT = (
    f"const themes = {{light: {json.dumps(LIGHT)}, dark: {json.dumps(DARK)}}}, narrowScreen = '{NARROW_SCREEN}';"
    + """
(function () {
  const dark = matchMedia("(prefers-color-scheme: dark)"), narrow = matchMedia("(max-width: " + narrowScreen + ")");
  function makeRoom() {
    document.querySelectorAll(".js-plotly-plot").forEach(function (div) {
      const least = (div.layout.meta || {}).least_width;
      if (!least || least <= div.clientWidth) return;
      div.style.minWidth = least + "px";
      Plotly.Plots.resize(div);
    });
  }
  let isAsDrawn = true;  // a large figure is not drawn twice where nothing changes
  function fit() {
    if (isAsDrawn && !dark.matches && !narrow.matches) return;
    isAsDrawn = false;
    document.querySelectorAll(".js-plotly-plot").forEach(function (div) {
      const meta = div.layout.meta || {};
      const change = Object.assign({template: dark.matches ? themes.dark : themes.light},
                                   (narrow.matches ? meta.narrow : meta.wide) || {});
      if (change.height) div.style.height = div.parentElement.style.height = change.height + "px";
      Plotly.relayout(div, change);
      if (meta.wide_only) Plotly.restyle(div, {visible: !narrow.matches}, meta.wide_only);
    });
  }
  dark.addEventListener("change", fit);
  narrow.addEventListener("change", fit);
  addEventListener("load", function () { makeRoom(); fit(); });
})();
"""
)
"""For pages: gives every figure the colours of the reader's scheme and the layout of a narrow or
wide screen."""


# -- words -----------------------------------------------------------------------------------------


def wrapped(text: str, *, width: int, lines: int = 3) -> str:
    """Plain text as that of a label: escaped, at most `lines` lines of about `width` letters."""
    parts = textwrap.wrap(text, width=width, break_long_words=True) or [""]
    if len(parts) > lines:
        parts = [*parts[: lines - 1], parts[lines - 1][: width - 1] + "…"]
    return "<br>".join(map(escaped, parts))


def escaped(text: str) -> str:
    """Plain text for a label.

    Quotes stay as they are: plotly would show the letters of `&quot;`.
    """
    return escape(text, quote=False)


def with_heading(drawing: "go.Figure", title: str, *, width: int, height: int) -> "go.Figure":
    """A copy that can stand alone, as a picture does: title and note on top, and paper that is white."""
    letters = max(20, width // 8)
    note = wrapped(note_of(drawing), width=letters, lines=6) if note_of(drawing) else ""
    heading = f"<b>{wrapped(title, width=letters)}</b>"
    lines = 1 + heading.count("<br>") + (note.count("<br>") + 1 if note else 0)
    copy = type(drawing)(drawing)
    text = heading + (f"<br><span style='font-size:0.85em'>{note}</span>" if note else "")
    room = (
        (drawing.layout.margin.t or 30) + 12 + 20 * lines + 22 * _legend_rows(drawing, width=width)
    )
    copy.update_layout(
        title={
            "text": text,
            "x": 0.01,
            "xanchor": "left",
            "y": 1 - 18 / height,
            "yref": "container",
            "yanchor": "top",
        },
        title_font_size=16,
        margin_t=room,
        paper_bgcolor="white",
        plot_bgcolor="white",
    )
    return copy


def _legend_rows(drawing: "go.Figure", *, width: int) -> int:
    """About how many rows a legend above the figure has; plotly leaves room for them, but not for a title above."""
    if drawing.layout.legend.orientation != "h":
        return 0
    names = [str(trace.name or "") for trace in drawing.data if trace.showlegend is not False]
    longest = max((len(name) for name in names), default=0)
    a_row = max(1, round(0.7 * width) // (50 + 7 * longest))
    return max(0, math.ceil(len(names) / a_row) - 1)


def listed_numbers(numbers: Sequence[int], *, most: int = 12) -> str:
    """`#1, #4, #7`."""
    shown = ", ".join(f"#{number}" for number in numbers[:most])
    return shown + (f" and {len(numbers) - most} more" if len(numbers) > most else "")
