"""Where text comes from: the Python documentation, local files and folders, or the Hugging Face hub.

Everything but the default text is read by the `datasets` library.
"""

import glob
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autotune.errors import InvalidDataset
from autotune.workload import STANDARD_LIBRARY_TEXT, Workload

HUB_TIMEOUT_SECONDS = 10

READERS = {
    ".txt": "text",
    ".md": "text",
    ".rst": "text",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
"""How `datasets` calls the reader of each kind of local file."""


def read_documents(workload: Workload, *, cache_folder: Path) -> Iterable[str]:
    """The documents of the workload's dataset. Raises InvalidDataset, naming the dataset and the way out."""
    check_name(workload.dataset)
    if workload.dataset == STANDARD_LIBRARY_TEXT:
        from autotune.data import python_docs

        return python_docs.documents()
    path = Path(workload.dataset).expanduser()
    if path.exists():
        rows = _read_local(path, cache_folder=cache_folder)
    else:
        rows = _read_hub(workload, cache_folder=cache_folder)
    return _text_column(rows, workload)


def check_name(name: str) -> None:
    """Raises InvalidDataset when `name` can be nothing but a local path and there is none. Costs nothing."""
    path = Path(name).expanduser()
    is_path = path.suffix.lower() in READERS or name.startswith((".", "/", "~")) or name.count("/") > 1
    if not name or (is_path and not path.exists()):
        raise InvalidDataset(f"there is no file or folder {name!r}", hint="check --dataset, or leave it out")


def _read_local(path: Path, *, cache_folder: Path) -> Any:
    import datasets

    datasets.disable_progress_bars()
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix.lower() in READERS)
    readers = {READERS.get(file.suffix.lower()) for file in files}
    if not files or None in readers:
        raise InvalidDataset(
            f"dataset {str(path)!r} holds no file autotune can read", hint=f"use one of {', '.join(READERS)}"
        )
    if len(readers) > 1:
        raise InvalidDataset(
            f"dataset folder {str(path)!r} mixes {', '.join(sorted(r for r in readers if r))} files",
            hint="name one file, or a folder with files of one kind",
        )
    if not any(file.stat().st_size for file in files):
        raise InvalidDataset(f"dataset {str(path)!r} is empty", hint="name a file with text in it")
    reader = readers.pop()
    options = {"sample_by": "document"} if reader == "text" else {}
    try:
        return datasets.load_dataset(
            reader,
            data_files=[glob.escape(str(file)) for file in files],
            split="train",
            cache_dir=str(cache_folder),
            **options,
        )
    except Exception as error:
        reason = str(error.__cause__ or error).strip().splitlines()
        raise InvalidDataset(
            f"dataset {str(path)!r} cannot be read as {reader}: {reason[0] if reason else type(error).__name__}",
            hint="check that the file is complete and of the kind its name says",
        ) from error


def _read_hub(workload: Workload, *, cache_folder: Path) -> Any:
    import datasets
    from huggingface_hub import HfApi

    datasets.disable_progress_bars()
    try:
        if not datasets.config.HF_HUB_OFFLINE:
            # One short question first: without a network the library would retry for half a minute.
            HfApi().dataset_info(workload.dataset, timeout=HUB_TIMEOUT_SECONDS)
        return datasets.load_dataset(
            workload.dataset, workload.dataset_config, split=workload.dataset_split, cache_dir=str(cache_folder)
        )
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise InvalidDataset(
            f"dataset {workload.dataset!r} is no local path and cannot be loaded from the Hugging Face hub: "
            f"{reason[0] if reason else type(error).__name__}",
            hint="name a local text, jsonl, csv or parquet file, check the hub name, its config and split, "
            f"or leave --dataset out for {STANDARD_LIBRARY_TEXT}",
        ) from error


def _text_column(rows: Any, workload: Workload) -> Iterable[str]:
    """The named column, else the one called text, else the only column of strings."""
    strings = [name for name, feature in rows.features.items() if getattr(feature, "dtype", "") in _STRING_TYPES]
    wanted = workload.text_column
    if wanted is None and ("text" in strings or len(strings) == 1):
        wanted = "text" if "text" in strings else strings[0]
    if wanted not in strings:
        found = ", ".join(strings) or "none"
        raise InvalidDataset(
            f"dataset {workload.dataset!r} has "
            + (f"no text column {wanted!r}" if wanted else "no single text column to choose"),
            hint=f"name one with --text-column; columns of text: {found}",
        )
    return (text for text in rows[wanted] if text)


_STRING_TYPES = {"string", "large_string", "string_view"}
