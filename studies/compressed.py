"""Results of studies in gzipped files: one JSON document, or rows of JSON; `zcat` shows them."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_json(file: Path) -> Any:
    """Return the JSON document of a file."""
    return json.loads(gzip.decompress(file.read_bytes()))


def write_json(file: Path, content: object) -> None:
    """Write a JSON document."""
    file.write_bytes(gzip.compress((json.dumps(content, indent=1) + "\n").encode(), mtime=0))


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; none where there is no file."""
    if not file.exists():
        return []
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write all rows, compressed together."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_bytes(gzip.compress(text.encode(), mtime=0))


def append_row(file: Path, row: dict[str, Any]) -> None:
    """Add one row, which a killed recording keeps; `write_rows` then makes the file small."""
    with gzip.open(file, "at", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")
