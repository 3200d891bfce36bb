"""Which files of a folder are a dataset, and which belong to which split."""

from collections.abc import Iterable
from pathlib import Path

READERS = {
    ".txt": "text",
    ".md": "text",
    ".rst": "text",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
"""Name of the reader in `datasets`, by suffix of a local file."""
ALL = "train"
"""The split of all files if no file is named after a split."""


def dataset_files(files: Iterable[Path]) -> list[Path]:
    """Returns the readable ones in alphabetical order, without dataset cards and the like."""
    files = sorted(file for file in files if file.suffix.lower() in READERS)
    if not files:
        return []
    from datasets.data_files import FILES_TO_IGNORE

    return [file for file in files if file.name not in FILES_TO_IGNORE] or files


def files_named_by_split(folder: Path, everything: list[Path]) -> dict[str, list[Path]]:
    """Returns {split: files} by the names of files and folders, as `datasets` assigns them."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    try:
        found = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
    except FileNotFoundError:  # it finds no data files
        return {}
    readable = {str(file.resolve()): file for file in everything}
    by_split = {
        str(split): sorted({readable[name] for name in map(_resolved, names) if name in readable})
        for split, names in found.items()
    }
    return {split: files for split, files in by_split.items() if files}


def _resolved(name: str) -> str:
    return str(Path(name).resolve())
