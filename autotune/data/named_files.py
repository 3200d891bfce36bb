"""Check that files of a dataset lead to no other file: saved datasets, archives, chained names."""

import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import InvalidDataset
from autotune.spec.user_files import open_file, read_json

SAVED_SET, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files that `save_to_disk` writes to the folder of a dataset, and of one with splits."""

_LARGEST_STATE_BYTES = 32 * 2**20
_PACKED = tuple(
    bytes.fromhex(beginning)
    for beginning in (
        "1f8b",  # gzip
        "425a68",  # bzip2
        "fd377a585a00",  # xz
        "28b52ffd",  # zstd
        "04224d18",  # lz4
        "377abcaf271c",  # 7z
        "526172211a07",  # rar
    )
)
"""What files that `datasets` unpacks begin with, besides the archives of zip and tar."""


def check_saved(folder: Path, *, dataset: str) -> None:
    """Raise InvalidDataset for a dataset of `save_to_disk` that names files of other folders."""
    folders = [folder]
    if (folder / SAVED_SPLITS).exists():
        described = read_json(folder / SAVED_SPLITS, most_bytes=_LARGEST_STATE_BYTES)
        splits = described.get("splits") if isinstance(described, dict) else None
        splits = splits if isinstance(splits, list) else [splits]
        for split in splits:
            _check_plain_name(split, SAVED_SPLITS, dataset=dataset)
        folders = [folder / split for split in splits]
    for saved in folders:
        if (saved / SAVED_SET).exists():
            state = read_json(saved / SAVED_SET, most_bytes=_LARGEST_STATE_BYTES)
            for name in _file_names(state):
                _check_plain_name(name, SAVED_SET, dataset=dataset)


def _file_names(value: Any) -> Iterator[Any]:
    """Yield each `filename` in what JSON can hold."""
    if isinstance(value, dict):
        if "filename" in value:
            yield value["filename"]
        for inner in value.values():
            yield from _file_names(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _file_names(inner)


def _check_plain_name(name: Any, file: str, *, dataset: str) -> None:
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\:\0"):
        raise InvalidDataset(
            f"dataset {dataset!r}: its {file} names {name!r:.100}, which is no file of its folder",
            hint="save it again with save_to_disk",
        )


def check_whole_names(files: Sequence[Path], *, dataset: str) -> None:
    """Raise InvalidDataset for a name that `datasets` would take for a chain of addresses."""
    for file in files:
        if "::" in str(file):
            raise InvalidDataset(
                f"dataset {dataset!r} has a file with two colons in a row in its path: "
                f"{file.name!r:.100}",
                hint="rename it or its folder",
            )


def check_not_packed(files: Sequence[Path], *, dataset: str) -> None:
    """Raise InvalidDataset for a file that `datasets` would unpack, whatever its name is.

    What is in it has not been looked at: its size, its links.
    """
    for file in files:
        try:
            with open_file(file) as opened:
                is_packed = opened.read(8).startswith(_PACKED)
            is_packed = is_packed or zipfile.is_zipfile(file) or tarfile.is_tarfile(file)
        except OSError as error:
            raise InvalidDataset(
                f"dataset {dataset!r} cannot be read: {error.strerror or error}",
                hint="check its permissions and the disk",
            ) from None
        if is_packed:
            raise InvalidDataset(
                f"dataset {dataset!r}: {file.name} is compressed or an archive, whatever its "
                "suffix says",
                hint="unpack it, and name the file or the folder that comes out",
            )
