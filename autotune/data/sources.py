"""Read a dataset: the Python documentation, local files and folders, or the Hugging Face hub.

Plain text is read in pieces (`text_files.py`), everything else by the `datasets` library:
https://huggingface.co/docs/datasets
"""

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autotune.data import hub
from autotune.data.columns import RowDocuments, documents_of
from autotune.data.dataset_card import Configuration, configuration
from autotune.data.named_files import (
    SAVED_SET,
    SAVED_SPLITS,
    check_not_packed,
    check_saved,
    check_whole_names,
)
from autotune.data.rows import unreadable
from autotune.data.text_files import TextFiles, check_files
from autotune.errors import InvalidDataset
from autotune.shipped import python_docs
from autotune.shipped.dataset_files import ALL, READERS, dataset_files, files_named_by_split
from autotune.spec.user_paths import expanded, is_plain_file, path_exists
from autotune.spec.workload import STANDARD_LIBRARY_TEXT, Workload

MOST_FILES = 100_000

Documents = Iterable[str] | RowDocuments


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The documents to train on and the held-out ones; both can be iterated several times."""

    train: Documents
    held_out: Documents | None = None
    """None: a fixed fraction of `train`, by hash."""


def read_documents(workload: Workload, *, cache_folder: Path) -> Parts:
    """Returns the documents of the workload's dataset.

    Raises InvalidDataset if it does not exist or cannot be read.
    """
    check_name(workload.dataset)
    read_split = _split_reader(workload, cache_folder=cache_folder)
    train = read_split(workload.dataset_split)
    if workload.held_out_split is None:
        return Parts(train=train)
    return Parts(train=train, held_out=read_split(workload.held_out_split))


def check_name(name: str) -> None:
    """Raise InvalidDataset if `name` can only be a local path that does not exist.

    This makes no request to the hub.
    """
    if not name or (hub.is_local_name(name, suffixes=tuple(READERS)) and not path_exists(name)):
        raise InvalidDataset(
            f"there is no file or folder {name!r}", hint="check --dataset, or omit it"
        )


def check_there(workload: Workload) -> None:
    """Raise InvalidDataset if the dataset exists neither locally nor on the hub.

    This makes at most one request to the hub.
    """
    check_name(workload.dataset)
    is_here = workload.dataset == STANDARD_LIBRARY_TEXT or path_exists(workload.dataset)
    if not is_here and workload.script is None:
        hub.check_dataset(workload.dataset)


def _split_reader(workload: Workload, *, cache_folder: Path) -> Callable[[str], Documents]:
    """Returns a function from the name of a split to its documents."""
    path = expanded(workload.dataset)
    check_splits(workload)
    if workload.dataset == STANDARD_LIBRARY_TEXT:
        return lambda _split: python_docs.standard_library_texts()
    if not path.exists():
        return lambda split: documents_of(hub.load_rows(workload, split=split), workload)
    if (path / SAVED_SET).exists() or (path / SAVED_SPLITS).exists():
        return lambda split: documents_of(_saved_rows(path, workload, split=split), workload)
    if path.is_dir() and workload.dataset_config is not None:
        configured = configuration(path, workload.dataset_config, dataset=workload.dataset)
        if configured is not None:
            return lambda split: documents_of(
                _configured_rows(configured, workload, split=split, cache_folder=cache_folder),
                workload,
            )
    if not path.is_dir() and not is_plain_file(path):
        raise InvalidDataset(
            f"dataset {workload.dataset!r} is neither a regular file nor a folder",
            hint="save what a pipe or a device gives as a file, and name that",
        )
    files = _files_by_split(path, workload)
    return lambda split: _read_files(files, workload, split=split, cache_folder=cache_folder)


def check_splits(workload: Workload) -> None:
    """Raise InvalidDataset for a held-out split of a dataset that cannot have splits."""
    is_one_text = workload.dataset == STANDARD_LIBRARY_TEXT or is_plain_file(
        expanded(workload.dataset)
    )
    if is_one_text and workload.held_out_split is not None:
        raise InvalidDataset(
            f"dataset {workload.dataset!r} is one text without a split {workload.held_out_split!r}",
            hint="leave --held-out-split out: a tenth is held out; or name a folder with a file "
            "for each split",
        )


# -- folders saved by datasets ---------------------------------------------------------------------


def _saved_rows(path: Path, workload: Workload, *, split: str) -> Any:
    datasets = hub.quiet_datasets()

    check_saved(path, dataset=workload.dataset)
    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as error:
        raise unreadable(workload.dataset, error, kind="a dataset saved by save_to_disk") from error
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise _no_split(workload, split, known=list(saved))
        return saved[split]
    if split != workload.dataset_split:
        raise _no_split(workload, split, known=[])
    return saved


def _no_split(workload: Workload, split: str, *, known: list[str]) -> InvalidDataset:
    hint = "it has no splits: leave --held-out-split out"
    if known:
        hint = f"its splits are {', '.join(known)}"
    return InvalidDataset(f"dataset {workload.dataset!r} has no split {split!r}", hint=hint)


# -- local files -----------------------------------------------------------------------------------


def _files_by_split(path: Path, workload: Workload) -> dict[str, list[Path]]:
    """Returns the files to read by split; all are in one split unless their names tell splits."""
    everything = dataset_files(files_below(path)) if path.is_dir() else [path]
    _kind_of(everything, path=path)
    if not any(file.stat().st_size for file in everything):
        raise InvalidDataset(f"dataset {str(path)!r} is empty", hint="name a file with text in it")
    if path.is_file():
        return {ALL: everything}
    splits = files_named_by_split(path, everything)
    wants_splits = workload.held_out_split is not None or workload.dataset_split != ALL
    # A single file called test.txt is no evidence of splits: they count if they cover every file.
    in_splits = {file for files in splits.values() for file in files}
    is_laid_out = ALL in splits and in_splits == set(everything)
    if splits and (wants_splits or is_laid_out):
        return splits
    return {ALL: everything}


def _kind_of(files: Sequence[Path], *, path: Path) -> str:
    """Returns the reader of all files of a dataset. Raises InvalidDataset where there is none."""
    if not files or any(file.suffix.lower() not in READERS for file in files):
        raise InvalidDataset(
            f"dataset {str(path)!r} has no file that autotune can read",
            hint=f"use one of {', '.join(READERS)}",
        )
    kinds = {READERS[file.suffix.lower()] for file in files}
    if len(kinds) > 1:
        raise InvalidDataset(
            f"dataset folder {str(path)!r} mixes {', '.join(sorted(kinds))} files",
            hint="name one file, or a folder with files of one kind",
        )
    return kinds.pop()


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the regular files in a folder and those in it, without following links to folders.

    Raises InvalidDataset after more entries than a dataset has: somebody has named a whole disk.
    """
    entries = 0
    folders = [str(folder)]
    while folders:
        try:
            opened = os.scandir(folders.pop())
        except OSError:  # not for this user, or removed in between
            continue
        with opened:
            for entry in opened:
                entries += 1
                if entries > MOST_FILES:
                    raise InvalidDataset(
                        f"dataset folder {str(folder)!r} has more than {MOST_FILES} files and "
                        "folders in it",
                        hint="name the folder that has only the dataset, or join its files",
                    )
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif is_plain_file(Path(entry.path)):
                    yield Path(entry.path)


def _read_files(
    files: dict[str, list[Path]], workload: Workload, *, split: str, cache_folder: Path
) -> Documents:
    """Returns the documents of a split; for records also of a slice such as train[:400]."""
    kind = READERS[next(iter(files.values()))[0].suffix.lower()]
    if kind == "text":
        if split not in files:
            raise _no_split(workload, split, known=list(files))
        return TextFiles(
            files=files[split],
            dataset=workload.dataset,
            beginnings_only=workload.packing == "padded",
        )
    return documents_of(
        _rows(kind, files, workload, split=split, cache_folder=cache_folder), workload
    )


def _shorter_path(folder: Path) -> str:
    """Returns the path of a folder, from the current folder if that is shorter.

    `datasets` makes the whole path the name of a lock, and names have at most 255 bytes: a few
    dozen letters of a path that are not ASCII.
    """
    return min(str(folder), os.path.relpath(folder), key=lambda path: len(os.fsencode(path)))


def _configured_rows(
    configured: Configuration, workload: Workload, *, split: str, cache_folder: Path
) -> Any:
    """Returns the rows of a folder whose dataset card defines its configurations, as on the hub."""
    every_file = [file for files in configured.files.values() for file in files]
    kind = _kind_of(every_file, path=expanded(workload.dataset))
    return _rows(
        kind,
        configured.files,
        workload,
        split=split,
        cache_folder=cache_folder,
        options=configured.options,
    )


def _rows(
    kind: str,
    files: Mapping[str, Sequence[Path]],
    workload: Workload,
    *,
    split: str,
    cache_folder: Path,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    datasets = hub.quiet_datasets()

    every_file = [file for split_files in files.values() for file in split_files]
    check_whole_names(every_file, dataset=workload.dataset)
    check_not_packed(every_file, dataset=workload.dataset)
    if kind != "parquet":
        check_files(
            every_file,
            dataset=workload.dataset,
            streaming=workload.streaming,
            kind=kind,
            names_separator=bool({"sep", "delimiter"} & set(options)),
        )
    data_files = {
        name: [glob.escape(str(file)) for file in split_files]
        for name, split_files in files.items()
    }
    try:
        return datasets.load_dataset(
            kind,
            data_files=data_files,
            split=split,
            cache_dir=_shorter_path(cache_folder),
            streaming=workload.streaming,
            **options,
        )
    except Exception as error:
        raise unreadable(workload.dataset, error, kind=kind) from error
