"""Files that commands write. The suffix of a figure's file sets its format."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from autotune.errors import InvalidInput
from autotune.reporting.image import DEFAULT_HEIGHT, DEFAULT_WIDTH, image_of
from autotune.reporting.output_file import check_writable, write_file
from autotune.spec.setting import THE_FIGURE, Settings, number, setting, whole_number

if TYPE_CHECKING:
    import plotly.graph_objects as go

FORMATS = ("html", "png", "svg", "json")
_IMAGES = ("png", "svg")
LARGEST_IMAGE = 10_000
"""Largest side in pixels, times the scale; browsers fail somewhere above."""


@dataclass(frozen=True, kw_only=True)
class ImageSize(Settings):
    """The size of a figure that is written as an image."""

    width: Annotated[int, whole_number(1, LARGEST_IMAGE)] | None = setting(
        None, "Width of a png or svg in pixels. [default: 1100]", group=THE_FIGURE
    )
    height: Annotated[int, whole_number(1, LARGEST_IMAGE)] | None = setting(
        None, "Height of a png or svg in pixels. [default: the figure's]", group=THE_FIGURE
    )
    scale: (
        Annotated[float, number("a number above zero", least=1e-9, most=LARGEST_IMAGE)] | None
    ) = setting(None, "Resolution of a png: 2 for twice the pixels. [default: 1]", group=THE_FIGURE)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A file to write a figure to. Raises InvalidInput for an unknown suffix or an invalid size."""

    file: Path
    size: ImageSize = ImageSize()

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise InvalidInput(
                f"a figure cannot be written as {self.file.name!r}",
                hint=f"end the file's name in one of {', '.join('.' + name for name in FORMATS)}",
            )
        size = self.size
        given = {f"--{name}": value for name, value in vars(size).items() if value is not None}
        if given and self.format not in _IMAGES:
            raise InvalidInput(
                f"{', '.join(given)}: only images have a size, {self.file.name} is not one",
                hint="write a .png or an .svg",
            )
        sides = [size.width or DEFAULT_WIDTH, size.height or DEFAULT_HEIGHT]
        if not all(0 < side * (size.scale or 1.0) <= LARGEST_IMAGE for side in sides):
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
            width=self.size.width,
            height=self.size.height,
            scale=self.size.scale or 1.0,
        )
