"""Check a dataset and a tokenizer before anything starts, without importing torch.

A small dataset is tokenized once into a temporary folder; of a large one only the beginning of each
part is read.
"""

import dataclasses
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from autotune.data.sources import check_splits, read_documents
from autotune.data.tokenizer import load_tokenizer
from autotune.data.tokens import write_tokens
from autotune.spec.user_paths import expanded, path_exists
from autotune.spec.workload import STANDARD_LIBRARY_TEXT, Workload

READ_WHOLE_BYTES = 2**20
"""Datasets up to this size are tokenized completely."""
_FIRST_DOCUMENTS = 16
"""Number of documents, or pieces of a text file, that are read of a larger dataset."""


def check_data(workload: Workload) -> None:
    """Raise the InvalidDataset or InvalidInput that the preparation of the data would raise.

    Datasets on the hub are checked only by the preparation.
    """
    if workload.script is not None:
        return
    if workload.tokenizer not in ("bytes", "bpe"):
        load_tokenizer(workload)
    check_splits(workload)
    if workload.dataset == STANDARD_LIBRARY_TEXT or not path_exists(workload.dataset):
        return
    with TemporaryDirectory() as folder:
        _check_local(workload, Path(folder))


def _check_local(workload: Workload, folder: Path) -> None:
    cache_folder = folder / "datasets"
    if _size_bytes(expanded(workload.dataset)) <= READ_WHOLE_BYTES:
        parts = read_documents(workload, cache_folder=cache_folder)
        write_tokens(parts, workload, folder=folder)
        return
    if "[" in f"{workload.dataset_split}{workload.held_out_split}":
        return  # a slice of a split cannot be streamed
    streamed = dataclasses.replace(workload, streaming=True)
    parts = read_documents(streamed, cache_folder=cache_folder)
    for documents in (parts.train, parts.held_out or ()):
        for _ in islice(documents, _FIRST_DOCUMENTS):
            pass


def _size_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
