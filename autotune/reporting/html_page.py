"""A figure as one HTML page that opens offline: plotly.js is inside, no request leaves the machine."""

import html

import plotly.graph_objects as go


def whole_page(title: str, *, about: str, answer: str, drawing: go.Figure, below: str = "") -> str:
    """`about` says what was looked at, `answer` what came out; `below` is HTML, everything else plain text."""
    figure = drawing.to_html(full_html=False, include_plotlyjs=True, default_height="72vh")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{html.escape(title)}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 75rem; padding: 0 1rem; color: #202124 }}
h1 {{ font-size: 1.4rem; margin: 0 }} .answer {{ font-weight: 600 }} .about {{ color: #5f6368; margin: .2rem 0 }}
</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<p class="about">{html.escape(about)}</p>
<p class="answer">{html.escape(answer)}</p>
{figure}
{below}
</body>
</html>
"""
