"""Renders the templates of reports, pages and notebooks; every value is escaped."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from autotune.printable import printable_values
from autotune.reporting import style
from autotune.reporting.html_text import printable_value

_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}
SHARED_STYLE = Path(__file__).parent / "shared.css"
"""The stylesheet that comes before that of a page."""
FIGURES_SCRIPT = Path(__file__).parent / "figures.js"
"""The script that draws the figures of a page, whose element `themes` has their colours."""


@cache
def templates(*packages: str) -> jinja2.Environment:
    """Returns the templates of these packages, and the pieces that every page shares."""
    return jinja2.Environment(
        loader=jinja2.ChoiceLoader(
            [jinja2.PackageLoader(package) for package in (*packages, "autotune.reporting")]
        ),
        autoescape=True,
        finalize=printable_value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def themes() -> Markup:
    """Returns the colours of figures on a light and on a dark page, as JSON."""
    return Markup(script_json({"light": style.LIGHT, "dark": style.DARK}))


def script_json(value: Any) -> str:
    """Returns JSON for a script element: nothing in it can end the element or begin a comment.

    Control characters in its texts are shown as escapes: the scripts show the texts as they are.
    """
    visible = printable_values(value)
    text = json.dumps(visible, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.translate(_ESCAPES)
