"""Check a dataset and a tokenizer before anything starts, without importing torch.

A small dataset is tokenized once into a temporary folder; of a large one only the beginning of each
part is read. Records and tokenizers are read by libraries in C++ and Rust, which can end their
process: deeply nested JSON overflows the stack of pyarrow. They run in a process of their own,
`python -m autotune.data.validation`, which is given the workload as JSON on its standard input.
"""

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from autotune.data.sources import check_splits, files_below, read_documents
from autotune.data.tokenizer import load_tokenizer
from autotune.data.tokens import write_tokens
from autotune.errors import AutotuneError, InvalidDataset, error_class
from autotune.shipped.dataset_files import READERS
from autotune.spec.user_paths import expanded, is_plain_file, path_exists
from autotune.spec.workload import STANDARD_LIBRARY_TEXT, Workload
from autotune.system.python_environment import python_environment

READ_WHOLE_BYTES = 2**20
"""Datasets up to this size are tokenized completely."""
_READ = (sys.executable, "-P", "-m", "autotune.data.validation")
_LONGEST_SECONDS = 300.0
"""It takes some seconds, and longer on a slow disk; a tokenizer and its chat template can be
written so that they do not end, in code that no signal stops."""
_FIRST_DOCUMENTS = 16
"""Number of documents, or pieces of a text file, that are read of a larger dataset."""


def check_data(workload: Workload) -> None:
    """Raise the InvalidDataset or InvalidInput that the preparation of the data would raise.

    Datasets on the hub are checked only by the preparation.
    """
    if workload.script is not None:
        return
    check_splits(workload)
    if _is_read_by_python(workload):
        read_data(workload)
        return
    try:
        reader = subprocess.run(
            _READ,
            input=json.dumps(workload.to_dict()),
            capture_output=True,
            text=True,
            errors="replace",
            env=python_environment(),
            timeout=_LONGEST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InvalidDataset(
            f"reading the beginning of dataset {workload.dataset!r} with tokenizer "
            f"{workload.tokenizer!r} took more than {_LONGEST_SECONDS:g} s",
            hint="use another tokenizer, look for a loop in its chat template, or save the text as "
            "a .txt file on a faster disk",
        ) from None
    try:
        answer = json.loads(reader.stdout)
    except ValueError:
        raise _reader_ended(workload, reader) from None
    if answer["kind"]:
        kind = error_class(answer["kind"]) or InvalidDataset
        raise kind(answer["message"], hint=answer["hint"])


def _is_read_by_python(workload: Workload) -> bool:
    """Whether the data needs no library that could end its process."""
    if workload.tokenizer not in ("bytes", "bpe"):
        return False
    if workload.dataset == STANDARD_LIBRARY_TEXT or not path_exists(workload.dataset):
        return True
    path = expanded(workload.dataset)
    is_text = READERS.get(path.suffix.lower()) == "text"
    return is_plain_file(path) and (is_text or path.suffix.lower() not in READERS)


def _reader_ended(workload: Workload, reader: subprocess.CompletedProcess[str]) -> InvalidDataset:
    """Returns the error for a process that has ended without an answer."""
    if reader.returncode < 0:
        ending = signal.Signals(-reader.returncode).name
    else:
        lines = reader.stderr.strip().splitlines() or [f"exit code {reader.returncode}"]
        ending = lines[-1]
    return InvalidDataset(
        f"reading dataset {workload.dataset!r} with tokenizer {workload.tokenizer!r} ended the "
        f"process that reads it: {ending}",
        hint="look for values nested thousands of levels deep and for damaged files, or save the "
        "text as a .txt file",
    )


def read_data(workload: Workload) -> None:
    """Read the data in this process. Raises as `check_data`."""
    if workload.tokenizer not in ("bytes", "bpe"):
        load_tokenizer(workload)
    if workload.dataset == STANDARD_LIBRARY_TEXT or not path_exists(workload.dataset):
        return
    with TemporaryDirectory() as folder:
        _check_local(workload, Path(folder))


def _check_local(workload: Workload, folder: Path) -> None:
    cache_folder = folder / "datasets"
    path = expanded(workload.dataset)
    files = files_below(path) if path.is_dir() else [path]
    if sum(file.stat().st_size for file in files) <= READ_WHOLE_BYTES:
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


def main() -> None:
    """Read the data of the workload on standard input; the answer is JSON on standard output."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    # It fails instead of the machine.
    half_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    resource.setrlimit(resource.RLIMIT_DATA, (half_bytes, half_bytes))
    answer = {"kind": "", "message": "", "hint": ""}
    try:
        read_data(Workload(**json.load(sys.stdin)))
    except AutotuneError as error:
        answer = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
    os.write(answers, json.dumps(answer).encode())


if __name__ == "__main__":
    main()
