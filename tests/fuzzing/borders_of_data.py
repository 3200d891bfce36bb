"""Border of a dataset's file. An input is the suffix of the file on a line of its own, and it."""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
from hypothesis import strategies

from autotune.data.sources import read_documents
from autotune.data.token_file import TextFacts
from autotune.data.tokens import write_tokens
from autotune.errors import InvalidDataset
from autotune.spec.workload import make_workload
from tests.fuzzing.judging import Border, Reader
from tests.fuzzing.mutations import changed_trees, json_text, with_changed_bytes

_OF_TEXT: list[Any] = [
    {"text": f"The {number}th text is about itself, {'and so on ' * 8}", "n": number}
    for number in range(40)
]
_OF_TOKENS: list[Any] = [
    {
        "input_ids": [*range(number, number + 10)],
        "attention_mask": [1] * 10,
        "labels": [-100, *range(number + 1, number + 10)],
    }
    for number in range(60)
]
_LINES = [f"{number} is the line of {number * number}, and some words" for number in range(2000)]
_FEW = 4
"""How many of the records are changed: the others are enough to be tokenized."""


def _json_lines(records: Any) -> bytes:
    lines = records if isinstance(records, list) else [records]
    return "".join(json_text(record) + "\n" for record in lines).encode()


def _csv(records: Any) -> bytes:
    """Returns records as CSV; what has no columns is one cell."""
    rows = [
        list(record.values()) if isinstance(record, dict) else [record]
        for record in (records if isinstance(records, list) else [records])
    ]
    text = io.StringIO()
    csv.writer(text, escapechar="\\").writerows([["text", "n"], *rows])
    return text.getvalue().encode(errors="surrogatepass")


def _parquet(records: Any) -> bytes:
    """Returns records as a parquet file; those that no table can hold as one of JSON lines."""
    file = io.BytesIO()
    try:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)
    except (
        pyarrow.ArrowException,
        TypeError,
        AttributeError,
        OverflowError,
        ValueError,
        LookupError,
    ):
        return _json_lines(records)
    return file.getvalue()


def _text(records: Any) -> bytes:
    lines = records if isinstance(records, list) else [records]
    return "\n".join(map(str, lines)).encode(errors="surrogatepass")


_WRITERS: Mapping[str, Callable[[Any], bytes]] = {
    "jsonl": _json_lines,
    "csv": _csv,
    "parquet": _parquet,
    "txt": _text,
}


@cache
def _records(suffix: str) -> tuple[Any, ...]:
    if suffix == "txt":
        return (_LINES,)
    return (_OF_TEXT,) if suffix == "csv" else (_OF_TEXT, _OF_TOKENS)


@strategies.composite
def _dataset_files(draw: Any) -> bytes:
    suffix = draw(strategies.sampled_from(tuple(_WRITERS)))
    records = draw(strategies.sampled_from(_records(suffix)))
    write = _WRITERS[suffix]
    if draw(strategies.sampled_from((True, True, False))):
        changed = draw(changed_trees([records[:_FEW]]))
        whole = [*changed, *records[_FEW:]] if isinstance(changed, list) else changed
        content = write(whole)
    else:
        content = draw(with_changed_bytes(write(records)))
    return suffix.encode() + b"\n" + content


class _Datasets(Reader):
    """Tokenizes a dataset, as the preparation of a study does, and reads the tokens again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._prepared = folder / "prepared"
        self._prepared.mkdir()

    def passes_first_check(self, given: bytes) -> bool:
        suffix, _, content = given.partition(b"\n")
        if suffix == b"parquet":
            return content[:4] == b"PAR1" == content[-4:]
        try:
            text = content.decode()
            if suffix == b"jsonl":
                return all(isinstance(json.loads(line), dict) for line in text.split("\n") if line)
            if suffix == b"csv":
                return len(list(csv.reader(io.StringIO(text), strict=True))) > 1
        except (ValueError, RecursionError, csv.Error):
            return False
        return bool(text)

    def read(self, given: bytes) -> Iterator[str]:
        suffix, _, content = given.partition(b"\n")
        file = self._folder / f"data.{suffix.decode()}"
        file.write_bytes(content)
        settings = {
            "dataset": str(file),
            "sequence_length": 8,
            "global_batch": 1,
            "steps": 9,
            "evaluation_sequences": 1,
            "packing": "padded" if b"labels" in content else "packed",
            # Without it, datasets writes all rows to a file first, which takes longer.
            "streaming": len(content) % 8 != 0,
        }
        workload = make_workload("cpu", settings)
        parts = read_documents(workload, cache_folder=self._folder / "cache")
        write_tokens(parts, workload, folder=self._prepared)
        facts = TextFacts.read(self._prepared)
        assert facts.bytes_per_token is None or facts.bytes_per_token > 0
        for name in ("train.npy", "held_out.npy"):
            tokens = numpy.load(self._prepared / name, mmap_mode="r")
            assert tokens.size
        yield from ()


@contextmanager
def _reading_datasets(folder: Path) -> Iterator[Reader]:
    import datasets

    datasets.disable_progress_bars()
    yield _Datasets(folder)


DATASET = Border(
    first_check="its text is UTF-8 with a JSON object in each line, or rows of CSV, or any text; "
    "a parquet file begins and ends as one",
    inputs=_dataset_files,
    valid=lambda: [
        suffix.encode() + b"\n" + write(records)
        for suffix, write in _WRITERS.items()
        for records in _records(suffix)
    ],
    reader=_reading_datasets,
    modules=("data/sources.py", "data/columns.py", "data/text_files.py", "data/tokens.py"),
    errors=(InvalidDataset,),
    inputs_in_suite=40,
)
