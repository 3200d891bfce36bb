"""Where commands write a figure: the format is the file's suffix."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.errors import InvalidInput, StorageUnavailable
from autotune.reporting.image import DEFAULT_HEIGHT, DEFAULT_WIDTH

if TYPE_CHECKING:
    import plotly.graph_objects as go

FORMATS = ("html", "png", "svg", "json")
_IMAGES = ("png", "svg")
LARGEST_PICTURE = 10_000
"""Pixels of a side, the scale counted in; browsers give up somewhere above."""

WidthOption = Annotated[
    int | None, typer.Option("--width", help="Pixels of a png or svg. [default: 1100]")
]
HeightOption = Annotated[
    int | None, typer.Option("--height", help="Pixels of a png or svg. [default: the figure's]")
]
ScaleOption = Annotated[
    float | None, typer.Option("--scale", help="Finer png: 2 for twice the pixels. [default: 1]")
]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A file to write a figure to.

    Raises InvalidInput for a suffix or a size that is not possible.
    """

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
        said = {"--width": self.width, "--height": self.height, "--scale": self.scale}
        given = {name: value for name, value in said.items() if value is not None}
        if given and self.format not in _IMAGES:
            raise InvalidInput(
                f"{', '.join(given)}: only pictures have a size, {self.file.name} is none",
                hint="write a .png or an .svg",
            )
        sides = [self.width or DEFAULT_WIDTH, self.height or DEFAULT_HEIGHT]
        if (
            not all(0 < side * (self.scale or 1.0) <= LARGEST_PICTURE for side in sides)
            or 0 in given.values()
        ):
            raise InvalidInput(
                f"{', '.join(f'{name} {value}' for name, value in given.items())} is no size of a picture",
                hint=f"give more than 0 and, times the scale, at most {LARGEST_PICTURE} pixels a side",
            )
        check_writable(self.file)

    @property
    def format(self) -> str:
        return self.file.suffix.removeprefix(".").lower()

    def write(self, drawing: "go.Figure", *, title: str, page: Callable[[], str]) -> None:
        """The figure, as `page` where the file is HTML."""
        write_file(self.file, self._content(drawing, title=title, page=page))

    def _content(self, drawing: "go.Figure", *, title: str, page: Callable[[], str]) -> str | bytes:
        from autotune.reporting.image import image_of

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


def check_writable(file: Path, *, option: str = "--out") -> None:
    """Raises StorageUnavailable where it is plain that `file` cannot be written, before anything is worked out."""
    try:
        nearest = next(folder for folder in file.parents if folder.exists())
        reason = (
            "Is a directory"
            if file.is_dir()
            else ""
            if nearest.is_dir()
            else f"{nearest} is no directory"
        )
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise StorageUnavailable(
            f"{file} cannot be written: {reason}", hint=f"name another file with {option}"
        )


def write_file(file: Path, content: str | bytes, *, option: str = "--out") -> None:
    """Makes the folders it needs. Raises StorageUnavailable."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # A message may hold half a character, of a path that is no UTF-8.
        file.write_bytes(content.encode(errors="replace") if isinstance(content, str) else content)
    except OSError as error:
        raise StorageUnavailable(
            f"{file} cannot be written: {error.strerror or error}",
            hint=f"name another file with {option}",
        ) from None
