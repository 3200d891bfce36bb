"""Read plain text files in pieces, so that the size of a file or a line does not matter.

Files of records are read by `datasets`, which needs a whole line in memory; `check_lines` finds
lines that are too long for that.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from autotune.errors import InvalidDataset
from autotune.units import format_size

PIECE_CHARACTERS = 1024 * 4096
"""A whole number of passages (`tokens.py`), so that reading in pieces does not change them."""
LARGEST_LINE_BYTES = 128 * 2**20
CHECKED_BYTES = 4 * 2**30
"""How much of streamed files is checked for long lines: more than a study will read."""


@dataclass(frozen=True, kw_only=True)
class TextFiles:
    """The text of each file in pieces; can be iterated several times."""

    files: Sequence[Path]
    dataset: str
    beginnings_only: bool = False
    """Whether each file is one document of which only the first piece is used."""

    def __iter__(self) -> Iterator[str]:
        for file in self.files:
            yield from islice(self._pieces(file), 1 if self.beginnings_only else None)

    def _pieces(self, file: Path) -> Iterator[str]:
        try:
            with file.open(encoding="utf-8") as stream:
                while piece := stream.read(PIECE_CHARACTERS):
                    if "\0" in piece:
                        raise ValueError("it has null bytes, so it is not text")
                    yield piece
        except (OSError, ValueError) as error:
            raise InvalidDataset(
                f"dataset {self.dataset!r} cannot be read as text: {_reason(error)} ({file.name})",
                hint="name a file of UTF-8 text",
            ) from error


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return error.strerror or ""
    return str(error)


def check_lines(files: Sequence[Path], *, dataset: str, streaming: bool) -> None:
    """Raise InvalidDataset for a line that is too long to be read into memory."""
    remaining = CHECKED_BYTES if streaming else math.inf
    for file in files:
        with file.open("rb") as stream:
            length = 0
            while remaining > 0:
                chunk = stream.read(min(2**20, LARGEST_LINE_BYTES))
                if not chunk:
                    break
                remaining -= len(chunk)
                line_end = chunk.find(b"\n")
                length += len(chunk) if line_end < 0 else line_end
                if length > LARGEST_LINE_BYTES:
                    raise InvalidDataset(
                        f"dataset {dataset!r} has a line of more than "
                        f"{format_size(LARGEST_LINE_BYTES)} in {file.name}",
                        hint="write one record per line, or plain text, which is read in pieces",
                    )
                if line_end >= 0:
                    length = len(chunk) - chunk.rfind(b"\n") - 1
