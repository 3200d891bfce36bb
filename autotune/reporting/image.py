"""Export a figure as PNG or SVG with kaleido and an installed browser; nothing is downloaded."""

from typing import TYPE_CHECKING

from autotune.errors import InvalidInput
from autotune.reporting.style import with_heading

if TYPE_CHECKING:
    import plotly.graph_objects as go

IMAGE_FORMATS = ("png", "svg")
DEFAULT_WIDTH, DEFAULT_HEIGHT = 1100, 700
"""Pixels. Figures with many rows set their height themselves."""
_ALTERNATIVE = "--out FILE.html works without it"


def image_of(
    drawing: "go.Figure",
    *,
    title: str,
    format: str,
    width: int | None = None,
    height: int | None = None,
    scale: float = 1.0,
) -> bytes:
    """Returns the figure with its title and note on white paper, as the bytes of an image.

    `width` and `height` are in pixels. Raises InvalidInput without kaleido or without a browser.
    """
    try:
        # An extra, and half a second, which only pictures need.
        import kaleido  # noqa: PLC0415
        from kaleido.errors import (  # noqa: PLC0415
            BrowserClosedError,
            BrowserFailedError,
            ChromeNotFoundError,
        )
    except ImportError:
        raise InvalidInput(
            f"{format} pictures need the package kaleido",
            hint=f"pip install 'autotune[images]'; {_ALTERNATIVE}",
        ) from None
    width = width or DEFAULT_WIDTH
    height = height or drawing.layout.height or DEFAULT_HEIGHT
    headed = with_heading(drawing, title, width=width, height=height)
    size = {"width": width, "height": height, "scale": scale}
    try:
        # Without mathjax, which would be downloaded: the figures have no formulas.
        return bytes(
            kaleido.calc_fig_sync(
                headed.to_dict(), opts={"format": format, **size}, kopts={"mathjax": False}
            )
        )
    except (ChromeNotFoundError, BrowserFailedError, BrowserClosedError):
        raise InvalidInput(
            f"{format} pictures need a browser, and no Chrome or Chromium could be started",
            hint=f"install one (apt install chromium), or name it in BROWSER_PATH; {_ALTERNATIVE}",
        ) from None
