"""Reads a data set, as `autotune/data/sources.py` does.

Which files belong to a split, and which columns have the text, depends on the data, so a script
decides it by the same rules as a study.
"""

import glob
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autotune.shipped.dataset_files import ALL, READERS, dataset_files, files_named_by_split
from autotune.shipped.script.written import (
    DATASET_CONFIG,
    DATASET_SPLIT,
    HELD_OUT_SPLIT,
    STREAMING,
    texts_of_rows,
)


def read_dataset(name: str, *, split: str) -> Iterable[Any]:
    """Reads text, jsonl, csv or parquet files, a folder of them, or a data set.

    A data set is a folder written by `save_to_disk` or a name on the hub.
    """
    path = Path(name).expanduser()
    is_saved = any((path / file).exists() for file in ("state.json", "dataset_dict.json"))
    if path.is_file() or (path.is_dir() and not is_saved and DATASET_CONFIG is None):
        return _read_files(path, split=split)
    import datasets

    if not is_saved:
        source = str(path) if path.is_dir() else name
        rows = datasets.load_dataset(source, DATASET_CONFIG, split=split, streaming=STREAMING)
        return texts_of_rows(rows)
    rows = datasets.load_from_disk(str(path))
    return texts_of_rows(rows[split] if isinstance(rows, datasets.DatasetDict) else rows)


def _read_files(path: Path, *, split: str) -> Iterable[Any]:
    all_files = [path]
    if path.is_dir():
        all_files = dataset_files(file for file in path.rglob("*") if file.is_file())
    kinds = {READERS.get(file.suffix.lower()) for file in all_files}
    if len(kinds) != 1 or kinds == {None}:
        known = ", ".join(READERS)
        raise SystemExit(f"{path} must contain files of one kind, one of: {known}")
    splits = {} if path.is_file() else files_named_by_split(path, all_files)
    in_splits = {file for files in splits.values() for file in files}
    is_laid_out = ALL in splits and in_splits == set(all_files)
    wants_splits = HELD_OUT_SPLIT is not None or DATASET_SPLIT != "train"
    files = splits if splits and (wants_splits or is_laid_out) else {ALL: all_files}
    [kind] = kinds
    if kind == "text":
        if split not in files:
            known = ", ".join(files)
            raise SystemExit(f"{path} has no split {split!r}. Choose one of: {known}")
        return (file.read_text(encoding="utf-8") for file in files[split])
    import datasets

    names = {}
    for name, paths in files.items():
        names[name] = [glob.escape(str(file)) for file in paths]
    rows = datasets.load_dataset(kind, data_files=names, split=split, streaming=STREAMING)
    return texts_of_rows(rows)
