"""Read plain text files in pieces, so that the size of a file or a line does not matter.

Files of records are read by `datasets`, which needs a whole line in memory; `check_lines` finds
lines that are too long for that.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import islice
from pathlib import Path

from autotune.errors import InvalidDataset
from autotune.spec.user_files import open_file
from autotune.units import format_size

PIECE_CHARACTERS = 1024 * 4096
"""A whole number of passages (`tokens.py`), so that reading in pieces does not change them."""
LARGEST_LINE_BYTES = 128 * 2**20
DEEPEST_JSON = 100
DEPTH_CHECKED_BYTES = 64 * 2**20
LONGEST_CHECKED_LINE_BYTES = 2**20
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\Z)', re.DOTALL)
_QUOTED = re.compile(rb'"[^"]*+"')
_BRACKETS = re.compile(rb"[\[\]{}]")
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
            with TextIOWrapper(open_file(file), encoding="utf-8") as stream:
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


def check_files(
    files: Sequence[Path], *, dataset: str, streaming: bool, kind: str, names_separator: bool
) -> None:
    """Raise InvalidDataset for files that no reader can hold in memory, or that nobody can read.

    `kind` is the name of the reader in `datasets`, and `names_separator` whether it is told what
    separates columns.
    """
    try:
        check_lines(files, dataset=dataset, streaming=streaming)
        if kind == "json":
            check_depth(files, dataset=dataset)
        if kind == "csv" and not names_separator:
            check_separator(files, dataset=dataset)
    except OSError as error:
        raise InvalidDataset(
            f"dataset {dataset!r} cannot be read: {_reason(error)}",
            hint="check its permissions and the disk",
        ) from error


def check_separator(files: Sequence[Path], *, dataset: str) -> None:
    """Raise InvalidDataset for CSV files whose columns are not separated by commas.

    They would be read as a single column that holds all of them. Raises OSError.
    """
    for file in files:
        with open_file(file) as stream:
            first = stream.readline(LONGEST_CHECKED_LINE_BYTES)
        # Inside of quotes a separator is a part of a name.
        names = _QUOTED.sub(b"", first).decode("utf-8", errors="replace")
        others = [separator for separator in ";\t|" if separator in names]
        if others and "," not in names:
            raise InvalidDataset(
                f"dataset {dataset!r} has columns separated by {others[0]!r} in {file.name}",
                hint="save it with commas, or as .parquet or .jsonl",
            )


def check_lines(files: Sequence[Path], *, dataset: str, streaming: bool) -> None:
    """Raise InvalidDataset for a line that is too long to be read into memory.

    Raises OSError.
    """
    remaining = CHECKED_BYTES if streaming else math.inf
    for file in files:
        with open_file(file) as stream:
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


def check_depth(files: Sequence[Path], *, dataset: str) -> None:
    """Raise InvalidDataset for a line of JSON that is nested so deeply that no reader can hold it.

    Only the beginnings of the files are looked at, DEPTH_CHECKED_BYTES in all, and of them lines of
    up to a mebibyte: what is deeper elsewhere ends the process that reads it. Raises OSError.
    """
    for file in files:
        remaining = DEPTH_CHECKED_BYTES // len(files)
        is_rest = False
        with open_file(file) as stream:
            while remaining > 0 and (line := stream.readline(LONGEST_CHECKED_LINE_BYTES)):
                remaining -= len(line)
                is_whole = line.endswith(b"\n") or len(line) < LONGEST_CHECKED_LINE_BYTES
                was_rest, is_rest = is_rest, not is_whole
                if is_whole and not was_rest and depth_of_json(line) > DEEPEST_JSON:
                    raise InvalidDataset(
                        f"dataset {dataset!r} has values nested more than {DEEPEST_JSON} levels "
                        f"deep in {file.name}",
                        hint="write one record per line, with a text or a list of tokens",
                    )


def depth_of_json(line: bytes) -> int:
    """Returns how deeply the values of a JSON text are nested; of one with few brackets a bound."""
    brackets = line.count(b"[") + line.count(b"{")
    if brackets <= DEEPEST_JSON:
        return brackets
    depth = deepest = 0
    for bracket in _BRACKETS.findall(_STRING.sub(b"", line)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest
