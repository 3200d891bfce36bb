"""Renders the templates of the pages; every value is escaped."""

from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from markupsafe import Markup

import autotune
from autotune.reporting.rendering import SHARED_STYLE, templates, themes
from autotune.service.pages import assets
from autotune.service.pages.contexts import sentence

_ENVIRONMENT = templates("autotune.service.pages")
_ENVIRONMENT.filters["sentence"] = sentence
_ENVIRONMENT.globals.update(
    themes=themes(),
    version=autotune.__version__,
    styles=Markup(SHARED_STYLE.read_text() + assets.FILES["page.css"].read_text()),
)


def render(request: Request, template: str, *, status: int = 200, **context: Any) -> HTMLResponse:
    """Returns a page or a part of one.

    Its template also knows the `caller`, None where nobody has signed in, and `root`, which every
    own address begins with.
    """
    root = request.app.state.settings.root_path
    caller = getattr(request.state, "caller", None)
    text = page_text(template, root=root, caller=caller, **context)
    return HTMLResponse(text, status)


def page_text(template: str, *, root: str, **context: Any) -> str:
    """Returns the text of a page, whose addresses begin with `root`."""
    return _ENVIRONMENT.get_template(template).render(
        root=root, static=lambda name: root + assets.address(name), **context
    )
