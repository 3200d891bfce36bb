"""Renders a report as one HTML page that opens offline and makes no request.

Texts of users are escaped by Jinja or inserted as JSON without any `<`. In addition, the content
security policy of the page allows only its own scripts and no request, so that even a text that
is not escaped could do nothing.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from markupsafe import Markup
from plotly.offline import get_plotlyjs

from autotune.printable import printable_values
from autotune.reporting import style
from autotune.reporting.html_page import PAPER_SCRIPT
from autotune.reporting.rendering import templates
from autotune.reporting.report.commands import template_parts
from autotune.reporting.report.contents import Report
from autotune.reporting.report.figures import ReportFigure, figures_of

_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


def page(report: Report) -> str:
    """Returns the HTML of the page."""
    scripts = {
        "plotly": get_plotlyjs(),
        "paper": PAPER_SCRIPT,
        "page": _resource("report.js"),
        "trials": _resource("trials.js"),
    }
    figures = figures_of(report.view)
    details = {
        **report.details,
        "rerun": template_parts(report.rerun_template),
        "export": template_parts(report.export_template),
    }
    front = [figure for figure in figures if figure.id == "pareto"]
    others = [figure for figure in figures if figure.id != "pareto"]
    return (
        templates(__package__)
        .get_template("page.html")
        .render(
            report=report,
            figures={"pareto": front[0] if front else None, "others": others},
            drawings={
                figure.id: Markup(script_json(figure.drawing.to_plotly_json()))
                for figure in figures
            },
            sections=_sections(report, others),
            torch=report.view.result.device.versions.get("torch", "?"),
            details=Markup(script_json(details)),
            themes=Markup(script_json({"light": style.LIGHT, "dark": style.DARK})),
            style=Markup(_resource("report.css")),
            scripts={name: Markup(text) for name, text in scripts.items()},
            policy=_policy(list(scripts.values()), figures),
        )
    )


def script_json(value: Any) -> str:
    """Returns JSON for a script element: nothing in it can end the element or begin a comment.

    Control characters in its texts are shown as escapes: the scripts show the texts as they are.
    """
    visible = printable_values(value)
    text = json.dumps(visible, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.translate(_ESCAPES)


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _sections(report: Report, others: Sequence[ReportFigure]) -> list[tuple[str, str]]:
    """Returns (id, title) of the sections of the page, in order."""
    sections = [("answer", "Answer"), ("front", "Front")]
    sections += [(figure.id, figure.short_title) for figure in others]
    sections.append(("trials", "All trials"))
    return [
        *sections,
        ("left-out", "Excluded"),
        ("study", "Study"),
        ("repeat", "Repeat"),
    ]


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
