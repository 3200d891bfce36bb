"""Files that commands write. The suffix of a figure's file sets its format."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.errors import InvalidInput
from autotune.reporting.image import DEFAULT_HEIGHT, DEFAULT_WIDTH, image_of
from autotune.reporting.output_file import check_writable, write_file
from autotune.spec.option import THE_FIGURE

if TYPE_CHECKING:
    import plotly.graph_objects as go

FORMATS = ("html", "png", "svg", "json")
_IMAGES = ("png", "svg")
LARGEST_IMAGE = 10_000
"""Largest side in pixels, times the scale; browsers fail somewhere above."""

WidthOption = Annotated[
    int | None,
    typer.Option(
        "--width",
        rich_help_panel=THE_FIGURE,
        help="Width of a png or svg in pixels. [default: 1100]",
    ),
]
HeightOption = Annotated[
    int | None,
    typer.Option(
        "--height",
        rich_help_panel=THE_FIGURE,
        help="Height of a png or svg in pixels. [default: the figure's]",
    ),
]
ScaleOption = Annotated[
    float | None,
    typer.Option(
        "--scale",
        rich_help_panel=THE_FIGURE,
        help="Resolution of a png: 2 for twice the pixels. [default: 1]",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A file to write a figure to. Raises InvalidInput for an unknown suffix or an invalid size."""

    file: Path
    width: int | None = None
    height: int | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise InvalidInput(
                f"a figure cannot be written as {self.file.name!r}",
                hint=f"end the file's name in one of {', '.join('.' + name for name in FORMATS)}",
            )
        options = {"--width": self.width, "--height": self.height, "--scale": self.scale}
        given = {name: value for name, value in options.items() if value is not None}
        if given and self.format not in _IMAGES:
            raise InvalidInput(
                f"{', '.join(given)}: only images have a size, {self.file.name} is not one",
                hint="write a .png or an .svg",
            )
        sides = [self.width or DEFAULT_WIDTH, self.height or DEFAULT_HEIGHT]
        scale = self.scale or 1.0
        is_possible = all(0 < side * scale <= LARGEST_IMAGE for side in sides)
        if 0 in given.values() or not is_possible:
            values = ", ".join(f"{name} {value}" for name, value in given.items())
            raise InvalidInput(
                f"Invalid image size: {values}",
                hint="give more than 0 and, multiplied by the scale, at most "
                f"{LARGEST_IMAGE} pixels per side",
            )
        check_writable(self.file)

    @property
    def format(self) -> str:
        return self.file.suffix.removeprefix(".").lower()

    def write(self, drawing: "go.Figure", *, title: str, page: Callable[[], str]) -> None:
        """Write the figure in the file's format; for HTML, write the text that `page` returns."""
        write_file(self.file, self._content(drawing, title=title, page=page))

    def _content(self, drawing: "go.Figure", *, title: str, page: Callable[[], str]) -> str | bytes:
        if self.format == "html":
            return page()
        if self.format == "json":
            return str(drawing.to_json(pretty=True))
        return image_of(
            drawing,
            title=title,
            format=self.format,
            width=self.width,
            height=self.height,
            scale=self.scale or 1.0,
        )
