"""A report as one HTML page that opens offline: everything is inside, and the page itself forbids any request.

Texts of users go in through Jinja's escaping or as JSON without a single `<`; the browser is told
to run our three scripts and no other, and to fetch nothing, so that even a text that got through
could do nothing.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from autotune.reporting.report.contents import Report
from autotune.reporting.report.figures import ReportFigure, figures_of
from autotune.reporting.report.trials import columns_of
from autotune.reporting.trial_text import SHARED_MARK_SAYS

_ESCAPES = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}


def page(report: Report) -> str:
    import jinja2
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    scripts = {"plotly": get_plotlyjs(), "page": _ours("report.js"), "trials": _ours("trials.js")}
    figures = figures_of(report.view)
    trials = {**report.trials, "rerun": report.rerun_template, "export": report.export_template}
    front = [one for one in figures if one.id == "pareto"]
    others = [one for one in figures if one.id != "pareto"]
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_ours("page.html")).render(
        report=report,
        figures={"pareto": front[0] if front else None, "others": others},
        drawings={one.id: Markup(script_json(one.drawing.to_plotly_json())) for one in figures},
        sections=_sections(report, others),
        columns=columns_of(report.trials),
        shared_mark_says=SHARED_MARK_SAYS if report.shares else "",
        torch=report.view.result.device.versions.get("torch", "?"),
        trials=Markup(script_json(trials)),
        themes=Markup(script_json(_themes())),
        style=Markup(_ours("report.css")),
        scripts={name: Markup(text) for name, text in scripts.items()},
        policy=_policy(list(scripts.values()), figures),
    )


def script_json(value: Any) -> str:
    """JSON that can stand inside of a script element: nothing in it ends the element or begins a comment."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).translate(
        _ESCAPES
    )


def _ours(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _themes() -> dict[str, Any]:
    from autotune.reporting import style

    return {"light": style.LIGHT, "dark": style.DARK}


def _sections(report: Report, others: Sequence[ReportFigure]) -> list[tuple[str, str]]:
    """What the page can be jumped to, in its order."""
    return [
        ("answer", "Answer"),
        ("front", "Front"),
        *((one.id, one.short_title) for one in others),
        *([("published", "Published table")] if report.published else []),
        ("trials", "All trials"),
        ("left-out", "Left out"),
        ("study", "Study"),
        ("repeat", "Repeat"),
    ]


def _policy(scripts: Sequence[str], figures: Sequence[ReportFigure]) -> str:
    """What a browser may do with the page.

    Only figures drawn by the graphics card compile code at run time.
    """
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in scripts
    ]
    evaluation = ["'unsafe-eval'"] if any(one.needs_graphics_card for one in figures) else []
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(hashes + evaluation)}",
            "style-src 'unsafe-inline'",
            "img-src data: blob:",
            "form-action 'none'",
            "base-uri 'none'",
        )
    )
