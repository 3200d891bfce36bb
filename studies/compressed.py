"""Results of studies in xz files: one JSON document, or rows of JSON; `xzcat` shows them."""

import json
import lzma
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_json(file: Path) -> Any:
    """Returns the JSON document of a file."""
    return json.loads(lzma.decompress(file.read_bytes()))


def write_json(file: Path, content: object) -> None:
    """Write a JSON document."""
    file.write_bytes(_compress(json.dumps(content, indent=1) + "\n"))


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file; none where there is no file."""
    if not file.exists():
        return []
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write all rows, compressed together."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_bytes(_compress(text))


def append_row(file: Path, row: dict[str, Any]) -> None:
    """Add one row, which a killed recording keeps; `write_rows` then makes the file small."""
    with lzma.open(file, "at", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")


def _compress(text: str) -> bytes:
    return lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)
