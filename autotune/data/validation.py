"""What is wrong with a dataset or a tokenizer, found before anything is begun and without loading torch.

A small dataset is made into tokens once, to be thrown away; of a large one the beginning of each
part is read.
"""

import dataclasses
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autotune.data.sources import check_splits, read_documents
from autotune.data.tokenizer import load_tokenizer
from autotune.spec.user_paths import expanded, is_there
from autotune.spec.workload import STANDARD_LIBRARY_TEXT, Workload

READ_WHOLE_BYTES = 2**20
_BEGINNING = 16
"""Documents, or pieces of a text file, that are read of a large dataset."""


def check_data(workload: Workload) -> None:
    """Raises InvalidDataset and InvalidInput, as the preparation would.

    What is on the hub is left to that.
    """
    if workload.script is not None:
        return
    if workload.tokenizer not in ("bytes", "bpe"):
        load_tokenizer(workload)
    check_splits(workload)
    if workload.dataset == STANDARD_LIBRARY_TEXT or not is_there(workload.dataset):
        return
    with TemporaryDirectory() as folder:
        _check_local(workload, Path(folder))


def _check_local(workload: Workload, folder: Path) -> None:
    from autotune.data.tokens import write_tokens

    if _size_bytes(expanded(workload.dataset)) <= READ_WHOLE_BYTES:
        write_tokens(
            read_documents(workload, cache_folder=folder / "datasets"), workload, folder=folder
        )
    elif (
        "[" not in f"{workload.dataset_split}{workload.held_out_split}"
    ):  # a part of a split cannot be streamed
        beginning = dataclasses.replace(workload, streaming=True)
        parts = read_documents(beginning, cache_folder=folder / "datasets")
        for documents in (parts.train, parts.held_out or ()):
            _read_beginning(documents)


def _read_beginning(documents: Iterable[Any]) -> None:
    for _ in islice(documents, _BEGINNING):
        pass


def _size_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
