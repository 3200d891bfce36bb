"""A figure as PNG or SVG, by kaleido and a browser that is there already. Nothing is fetched."""

from typing import TYPE_CHECKING

from autotune.errors import InvalidInput
from autotune.reporting.style import with_heading

if TYPE_CHECKING:
    import plotly.graph_objects as go

IMAGE_FORMATS = ("png", "svg")
DEFAULT_WIDTH, DEFAULT_HEIGHT = 1100, 700
"""Pixels; figures with many rows have a height of their own."""
WITHOUT = "--out FILE.html works without"


def image_of(
    drawing: "go.Figure",
    *,
    title: str,
    format: str,
    width: int | None = None,
    height: int | None = None,
    scale: float = 1.0,
) -> bytes:
    """The figure under its title and note, on white.

    Raises InvalidInput without kaleido or without a browser.
    """
    try:
        import kaleido
        from kaleido.errors import BrowserClosedError, BrowserFailedError, ChromeNotFoundError
    except ImportError:
        raise InvalidInput(
            f"{format} pictures need the package kaleido",
            hint=f"pip install 'autotune[images]'; {WITHOUT}",
        ) from None
    width = width or DEFAULT_WIDTH
    height = height or drawing.layout.height or DEFAULT_HEIGHT
    headed = with_heading(drawing, title, width=width, height=height)
    size = {"width": width, "height": height, "scale": scale}
    try:
        # Without mathjax, which would be fetched; no figure of ours has formulas.
        return bytes(
            kaleido.calc_fig_sync(
                headed.to_dict(), opts={"format": format, **size}, kopts={"mathjax": False}
            )
        )
    except (ChromeNotFoundError, BrowserFailedError, BrowserClosedError):
        raise InvalidInput(
            f"{format} pictures need a browser, and no Chrome or Chromium could be started",
            hint=f"install one (apt install chromium), or name it in BROWSER_PATH; {WITHOUT}",
        ) from None
