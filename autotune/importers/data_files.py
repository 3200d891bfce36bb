"""The data set that an entry of a trainer's list names: of the hub, or a file that is read."""

from collections.abc import Mapping
from typing import Any

_READERS = ("json", "csv", "parquet", "text")
"""Names of readers of `datasets`, which stand in `path` where `data_files` has the file."""


def named_by(entry: Mapping[str, Any]) -> Any:
    """Returns the name, or the first of the files; None, or another value, where it says none."""
    name, files = entry.get("id", entry.get("path")), entry.get("data_files")
    if name not in _READERS or not files:
        return name
    while isinstance(files, Mapping | list) and files:
        files = next(iter(files.values() if isinstance(files, Mapping) else files))
    return files
