"""Shared style of all figures: units, colours, symbols, light and dark mode, narrow screens.

The colours can be told apart by colour-blind people. A figure has no background and takes text and
grid colours from a template, so that a page can exchange `LIGHT` for `DARK` when the reader's
colour scheme changes (`SCREEN_SCRIPT` does). The colours of marks are readable on both.
"""

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from autotune.printable import printable
from autotune.reporting.html_text import html_text
from autotune.spec.prediction import Category

if TYPE_CHECKING:  # commands that print tables use the colours and texts, and do not draw
    import plotly.graph_objects as go

# The palette of Okabe and Ito, without its yellow, which is hard to see on white.
BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#56b4e9",
)
GREY = "#8a8a8a"
"""Readable on white and on black. For lines, error bars and infeasible trials."""
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, VERMILLION, SKY)
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "hexagon")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""One colour, symbol and dash for each thing a figure compares: colour alone is not enough."""

SCALE = ((0.0, "#f2b632"), (0.35, "#e0705b"), (0.7, "#b0479a"), (1.0, "#6c55c8"))
"""Colour scale for a number, low to high. Unlike those of Viridis, both ends can be seen on white
and on black."""

CATEGORY_COLORS: Mapping[Category | str, str] = {
    "parameters": BLUE,
    "buffers": SKY,
    "optimizer_state": PURPLE,
    "gradients": ORANGE,
    "gathered_weights": BLUE,
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
    "gathered_weights": "+",
    "activations": "",
    "temporaries": "x",
    "inputs": "|",
    "workspace": "-",
}
OTHER = "rest"
"""Category of the bytes of a peak that are not attributed."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A binary unit of memory and its bytes."""

    name: str
    size_bytes: int

    def of(self, size_bytes: float) -> float:
        """Convert bytes to this unit."""
        return size_bytes / self.size_bytes


_UNITS = tuple(
    Unit(name=name, size_bytes=1024**power) for name, power in (("GiB", 3), ("MiB", 2), ("KiB", 1))
)


def unit_for(size_bytes: float) -> Unit:
    """Returns the largest unit that is not larger than `size_bytes`."""
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
"""Templates. `Plotly.relayout(div, {template: DARK})` turns a drawn figure dark."""

NARROW_SCREEN = "45rem"
LEGEND_ABOVE = {"orientation": "h", "x": 0, "y": 1.01, "yanchor": "bottom"}


def styled(drawing: "go.Figure", *, note: str = "") -> "go.Figure":
    """Give an empty figure the light template and its margins, and return it.

    `note` is text that a page shows above the figure and an image on top of it.
    """
    import plotly.io  # noqa: PLC0415  # commands that print tables do without

    drawing.layout.template = _light_template(plotly.io.templates.default)
    drawing.update_layout(
        margin={"t": 30, "r": 16, "b": 50, "l": 16}, meta={"note": printable(note)}
    )
    return drawing


@cache
def _light_template(of_plotly: str | None) -> "go.layout.Template":
    """Returns plotly's own template of that name with what LIGHT changes: a merge takes 45 ms."""
    import plotly.graph_objects as go  # noqa: PLC0415  # commands that print tables do without

    return go.Figure(layout={"template": of_plotly}).update_layout(template=LIGHT).layout.template


def note_of(drawing: "go.Figure") -> str:
    """Returns the note of a figure as plain text, empty if it has none."""
    return str((drawing.layout.meta or {}).get("note", ""))


def on_narrow_screens(
    drawing: "go.Figure", changes: Mapping[str, Any], *, least_width: int | None = None
) -> None:
    """Store layout `changes` for phones in the figure, and how to undo them.

    A page scrolls the figure sideways if it is narrower than `least_width` pixels.
    """
    before = {path: _plain(drawing.layout[path]) for path in changes}
    meta = {**(drawing.layout.meta or {}), "narrow": dict(changes), "wide": before}
    if least_width is not None:
        meta["least_width"] = least_width
    drawing.update_layout(meta=meta)


def hide_on_narrow_screens(drawing: "go.Figure", *names: str) -> None:
    """Hide the traces of these names, such as labels, where a phone has no room for them."""
    indices = [index for index, trace in enumerate(drawing.data) if trace.name in names]
    drawing.update_layout(meta={**(drawing.layout.meta or {}), "wide_only": indices})


def grey_key(trace: Any) -> Any:
    """Returns a trace for the legend in grey, for marks of many colours.

    plotly would draw their legend entry black, on dark pages too.
    """
    trace.update(showlegend=False, legendgroup=trace.name)
    marker = {"symbol": trace.marker.symbol, "size": min(trace.marker.size, 14), "color": GREY}
    coordinates = {axis: [None] for axis in "xyz" if axis in trace}
    marker["line"] = trace.marker.line.to_plotly_json()
    return type(trace)(
        **coordinates, mode="markers", name=trace.name, legendgroup=trace.name, marker=marker
    )


def _plain(value: Any) -> Any:
    return value.to_plotly_json() if hasattr(value, "to_plotly_json") else value


SCREEN_SCRIPT = (
    f"const themes = {{light: {json.dumps(LIGHT)}, dark: {json.dumps(DARK)}}};"
    f"const narrowScreen = '{NARROW_SCREEN}';"
    + """
(function () {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: " + narrowScreen + ")");
  function makeRoom() {
    document.querySelectorAll(".js-plotly-plot").forEach(function (div) {
      const least = (div.layout.meta || {}).least_width;
      if (!least || least <= div.clientWidth) return;
      div.style.minWidth = least + "px";
      Plotly.Plots.resize(div);
    });
  }
  let isAsDrawn = true;  // do not draw a large figure twice if nothing changes
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
  paper.whenPrinted(function () {
    document.querySelectorAll(".js-plotly-plot").forEach(function (div) {
      const meta = div.layout.meta || {};
      const figure = structuredClone({data: div.data, layout: div.layout});
      const copy = paper.draw(div, figure, themes.light);
      if (!narrow.matches) return;
      Plotly.relayout(copy, meta.wide || {});
      if (meta.wide_only) Plotly.restyle(copy, {visible: true}, meta.wide_only);
    });
    return paper.clear;
  });
})();
"""
)
"""Script of a page: sets the colours of every figure by the reader's colour scheme, and the layout
by the width of the screen. Needs `PAPER_SCRIPT` of `html_page` before it."""


# -- text ------------------------------------------------------------------------------------------


def wrapped(text: str, *, width: int, lines: int = 3) -> str:
    """Returns plain text for a label: escaped, in `lines` lines of about `width` characters."""
    visible = printable(text, keep_lines=True)
    parts = textwrap.wrap(visible, width=width, break_long_words=True) or [""]
    if len(parts) > lines:
        parts = [*parts[: lines - 1], parts[lines - 1][: width - 1] + "…"]
    return "<br>".join(map(escaped, parts))


def escaped(text: str) -> str:
    """Escape plain text for a label, except quotes: plotly would show `&quot;` as it is."""
    return html_text(text, quote=False)


def with_heading(drawing: "go.Figure", title: str, *, width: int, height: int) -> "go.Figure":
    """Returns a copy for an image file, with title and note on top and a white background."""
    characters = max(20, width // 8)
    note = wrapped(note_of(drawing), width=characters, lines=6) if note_of(drawing) else ""
    heading = f"<b>{wrapped(title, width=characters)}</b>"
    lines = 1 + heading.count("<br>") + (note.count("<br>") + 1 if note else 0)
    copy = type(drawing)(drawing)
    text = heading
    if note:
        text += f"<br><span style='font-size:0.85em'>{note}</span>"
    legend_height = 22 * _legend_rows(drawing, width=width)
    top_margin = (drawing.layout.margin.t or 30) + 12 + 20 * lines + legend_height
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
        margin_t=top_margin,
        paper_bgcolor="white",
        plot_bgcolor="white",
    )
    return copy


def _legend_rows(drawing: "go.Figure", *, width: int) -> int:
    """Estimate the rows of a legend above the figure, beyond the first.

    plotly leaves room for them, but not for a title above them.
    """
    if drawing.layout.legend.orientation != "h":
        return 0
    names = [str(trace.name or "") for trace in drawing.data if trace.showlegend is not False]
    longest = max((len(name) for name in names), default=0)
    names_per_row = max(1, round(0.7 * width) // (50 + 7 * longest))
    return max(0, math.ceil(len(names) / names_per_row) - 1)


def listed_numbers(numbers: Sequence[int], *, most: int = 12) -> str:
    """Returns `#1, #4, #7`, with a count instead of the numbers after the first `most`."""
    shown = ", ".join(f"#{number}" for number in numbers[:most])
    return shown + (f" and {len(numbers) - most} more" if len(numbers) > most else "")
