"""Renders the templates of reports, pages and notebooks; every value is escaped."""

import jinja2

from autotune.reporting.html_text import printable_value


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
