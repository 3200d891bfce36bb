"""Renders the templates of the pages; every value is escaped."""

from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse

import autotune
from autotune.reporting.rendering import templates, themes
from autotune.service.pages import assets

_ENVIRONMENT = templates("autotune.service.pages")
_ENVIRONMENT.globals.update(themes=themes(), static=assets.address, version=autotune.__version__)


def render(request: Request, template: str, *, status: int = 200, **context: Any) -> HTMLResponse:
    """Returns a page or a part of one, whose template also knows the `caller`."""
    text = _ENVIRONMENT.get_template(template).render(
        caller=request.state.caller,
        **context,
    )
    return HTMLResponse(text, status)
