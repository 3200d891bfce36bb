"""A figure as one HTML page that opens offline: it contains plotly.js and makes no request."""

from pathlib import Path

import plotly.graph_objects as go

from autotune.reporting.html_text import html_text
from autotune.reporting.style import SCREEN_SCRIPT, note_of

PAPER_SCRIPT = (Path(__file__).parent / "paper.js").read_text(encoding="utf-8")
"""Script of a page: draws its figures for paper. A page says which, with `paper.whenPrinted`."""

_STYLE = """
:root { color-scheme: light dark; --text: #202124; --faint: #5f6368; --paper: #fff }
@media (prefers-color-scheme: dark) {
  :root { --text: #e8eaed; --faint: #bdc1c6; --paper: #17181a }
}
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 75rem; padding: 0 1rem;
  color: var(--text); background: var(--paper); overflow-wrap: anywhere }
h1 { font-size: 1.4rem; margin: 0 }
h2 { font-size: 1.15rem; margin: 1.2rem 0 .2rem }
.answer { font-weight: 600 }
.about, .note { color: var(--faint); margin: .2rem 0 }
.figure { overflow-x: auto }
details { margin-top: 1rem }
@media screen {
  /* The toolbar is above the figure: inside it would cover the legend. */
  .figure { padding-top: 30px }
  .modebar-container { top: -30px !important }
  .on-paper { position: absolute; left: -200rem }
}
@media print {
  @page { margin: 12mm 12mm 14mm }
  :root { color-scheme: light; --text: #202124; --faint: #4c555e; --paper: #fff }
  body { margin: 0; padding: 0; max-width: none; font-size: 10pt }
  .figure { overflow: visible; break-inside: avoid }
  .figure > div { height: auto !important }
  .js-plotly-plot:not(.on-paper) { display: none }
  summary { list-style: none; break-after: avoid }
  li { break-inside: avoid }
}
"""


def whole_page(
    title: str, *, about: str, answer: str, drawing: go.Figure, heading: str = "", below: str = ""
) -> str:
    """Returns the HTML of a page with one figure, its note above it.

    `about` says what was trained, `answer` is the result in a sentence, and `heading` is the title
    of the figure. `below` is HTML; all other texts are plain text and are escaped.
    """
    settings = {"displaylogo": False}  # the logo is a link to another site
    figure = drawing.to_html(
        full_html=False, include_plotlyjs=True, default_height="72vh", config=settings
    )
    note = note_of(drawing)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{html_text(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{html_text(title)}</h1>
<p class="about">{html_text(about)}</p>
<p class="answer">{html_text(answer)}</p>
{f"<h2>{html_text(heading)}</h2>" if heading else ""}
{f'<p class="note">{html_text(note)}</p>' if note else ""}
<div class="figure">{figure}</div>
{below}
<script>{PAPER_SCRIPT}</script>
<script>{SCREEN_SCRIPT}</script>
</body>
</html>
"""
