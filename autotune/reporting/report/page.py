"""Renders a report as one HTML page that opens offline and makes no request.

Texts of users are escaped by Jinja or inserted as JSON without any `<`. In addition, the content
security policy of the page allows only its own scripts and no request, so that even a text that
is not escaped could do nothing.
"""

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files

from markupsafe import Markup
from plotly.offline import get_plotlyjs

from autotune.reporting.html_page import PAPER_SCRIPT
from autotune.reporting.rendering import (
    FIGURES_SCRIPT,
    SHARED_STYLE,
    script_json,
    templates,
    themes,
)
from autotune.reporting.report.cards import CARDS, sections
from autotune.reporting.report.commands import template_parts
from autotune.reporting.report.contents import Report
from autotune.reporting.report.figures import ReportFigure, figures_of


def page(report: Report) -> str:
    """Returns the HTML of the page."""
    scripts = {
        "plotly": get_plotlyjs(),
        "paper": PAPER_SCRIPT,
        "page": _resource("report.js"),
        "figures": FIGURES_SCRIPT.read_text(encoding="utf-8"),
        "trials": _resource("trials.js"),
    }
    figures = figures_of(report.view)
    cards = [card for card in CARDS if card.id in figures]
    details = {
        **report.details,
        "rerun": template_parts(report.rerun_template),
        "export": template_parts(report.export_template),
    }
    return (
        templates(__package__)
        .get_template("page.html")
        .render(
            layout="offline.html",
            is_live=False,
            address="",
            report=report,
            cards=cards,
            figures=figures,
            sources={name: f"data-{name}" for name in figures},
            drawings={
                name: Markup(script_json(figure.drawing.to_plotly_json()))
                for name, figure in figures.items()
            },
            sections=sections(cards),
            details=Markup(script_json(details)),
            themes=themes(),
            style=Markup(SHARED_STYLE.read_text(encoding="utf-8") + _resource("report.css")),
            scripts={name: Markup(text) for name, text in scripts.items()},
            policy=_policy(list(scripts.values()), list(figures.values())),
        )
    )


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str], figures: Sequence[ReportFigure]) -> str:
    """Returns the content security policy of the page.

    It allows `eval` only if a figure is drawn with WebGL, which compiles code at run time.
    """
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in scripts
    ]
    script_sources = [*hashes]
    if any(figure.needs_graphics_card for figure in figures):
        script_sources.append("'unsafe-eval'")
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(script_sources)}",
            "style-src 'unsafe-inline'",
            "img-src data: blob:",
            "form-action 'none'",
            "base-uri 'none'",
        )
    )
