"""Plain text files, read piece by piece: a file of any size, and a line of any length, needs no more than a piece.

Files of records are read by `datasets`, which holds a line at a time; a line too long for that is
found here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from autotune.errors import InvalidDataset
from autotune.units import format_size

PIECE_CHARACTERS = 1024 * 4096
"""A whole number of passages (`tokens.py`), so that they are the same however a file is read."""
LARGEST_LINE_BYTES = 128 * 2**20
LOOKED_THROUGH_BYTES = 4 * 2**30
"""How far files are looked through for long lines when they are streamed: further than a study will
read."""


@dataclass(frozen=True, kw_only=True)
class TextFiles:
    """The text of each file in pieces, as often as it is asked for."""

    files: Sequence[Path]
    dataset: str
    beginnings_only: bool = False
    """Whether a file is one document of which only the first piece counts."""

    def __iter__(self) -> Iterator[str]:
        for file in self.files:
            yield from islice(self._pieces(file), 1 if self.beginnings_only else None)

    def _pieces(self, file: Path) -> Iterator[str]:
        try:
            with file.open(encoding="utf-8") as stream:
                while piece := stream.read(PIECE_CHARACTERS):
                    if "\0" in piece:
                        raise ValueError("it holds zero bytes, as no text does")
                    yield piece
        except (OSError, ValueError) as error:
            raise InvalidDataset(
                f"dataset {self.dataset!r} cannot be read as text: {_reason(error)} ({file.name})",
                hint="name a file of UTF-8 text",
            ) from error


def _reason(error: OSError | ValueError) -> str:
    return error.strerror or "" if isinstance(error, OSError) else str(error)


def check_lines(files: Sequence[Path], *, dataset: str, streaming: bool) -> None:
    """Raises InvalidDataset for a line that is too long to be held in memory."""
    left = LOOKED_THROUGH_BYTES if streaming else None
    for file in files:
        with file.open("rb") as stream:
            length = 0
            while (left is None or left > 0) and (
                chunk := stream.read(min(2**20, LARGEST_LINE_BYTES))
            ):
                left = None if left is None else left - len(chunk)
                ends_at = chunk.find(b"\n")
                length += len(chunk) if ends_at < 0 else ends_at
                if length > LARGEST_LINE_BYTES:
                    raise InvalidDataset(
                        f"dataset {dataset!r} has a line of more than {format_size(LARGEST_LINE_BYTES)} in {file.name}",
                        hint="write one record a line, or plain text, which is read piece by piece",
                    )
                if ends_at >= 0:
                    length = len(chunk) - chunk.rfind(b"\n") - 1
