"""Renders the templates of the pages; every value is escaped."""

from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse

import autotune
from autotune.reporting.rendering import templates, themes
from autotune.service.pages import assets

_ENVIRONMENT = templates("autotune.service.pages")
_ENVIRONMENT.globals.update(themes=themes(), version=autotune.__version__)


def render(request: Request, template: str, *, status: int = 200, **context: Any) -> HTMLResponse:
    """Returns a page or a part of one.

    Its template also knows the `caller`, and `root`, which every own address begins with.
    """
    root = request.app.state.settings.root_path
    text = _ENVIRONMENT.get_template(template).render(
        caller=request.state.caller,
        root=root,
        static=lambda name: root + assets.address(name),
        **context,
    )
    return HTMLResponse(text, status)
