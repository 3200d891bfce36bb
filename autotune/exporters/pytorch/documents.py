"""Reads text in an exported script: `documents(name, split=...)`, as `autotune/data/sources.py`.

Which files belong to a split, and which columns have the text, depends on the data, so the script
decides it by the same rules as a study.
"""

from autotune.exporters.bundle import Part, code
from autotune.spec.workload import STANDARD_LIBRARY_TEXT, Workload


def document_parts(workload: Workload) -> list[Part]:
    """Return the definition of `documents(name, split=...)`.

    It yields texts, or the tokens of a data set that is tokenized.
    """
    wants_splits = workload.held_out_split is not None or workload.dataset_split != "train"
    import_docs = python_docs = ""
    if workload.dataset == STANDARD_LIBRARY_TEXT:
        import_docs = "from autotune.shipped.python_docs import standard_library_texts\n"
        python_docs = (
            f"    if name == {STANDARD_LIBRARY_TEXT!r}:\n        return standard_library_texts()\n"
        )
    text = _DOCUMENTS.format(
        import_docs=import_docs,
        python_docs=python_docs,
        config=workload.dataset_config,
        streaming=workload.streaming,
        wants_splits=wants_splits,
        column=workload.text_column,
    )
    if workload.chat_column is None:
        return [code(text), code(_ROWS)]
    return [code(text), code(_CHAT_ROWS.format(column=workload.chat_column))]


_DOCUMENTS = '''
import glob
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from autotune.shipped.dataset_files import ALL, READERS, dataset_files, files_named_by_split
{import_docs}
DATASET_CONFIG: str | None = {config!r}
TEXT_COLUMN: str | None = {column!r}
STREAMING = {streaming}
WANTS_SPLITS = {wants_splits}


def documents(name: str, *, split: str) -> Iterable[Any]:
    """Reads text, jsonl, csv or parquet files, a folder of them, or a data set.

    A data set is a folder written by `save_to_disk` or a name on the hub.
    """
{python_docs}    path = Path(name).expanduser()
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


def files_below(folder: Path) -> Iterator[Path]:
    return (file for file in folder.rglob("*") if file.is_file())


def _read_files(path: Path, *, split: str) -> Iterable[Any]:
    all_files = [path] if path.is_file() else dataset_files(files_below(path))
    kinds = {{READERS.get(file.suffix.lower()) for file in all_files}}
    if len(kinds) != 1 or kinds == {{None}}:
        known = ", ".join(READERS)
        raise SystemExit(f"{{path}} must contain files of one kind, one of: {{known}}")
    splits = {{}} if path.is_file() else files_named_by_split(path, all_files)
    in_splits = {{file for files in splits.values() for file in files}}
    is_laid_out = ALL in splits and in_splits == set(all_files)
    files = splits if splits and (WANTS_SPLITS or is_laid_out) else {{ALL: all_files}}
    [kind] = kinds
    if kind == "text":
        if split not in files:
            known = ", ".join(files)
            raise SystemExit(f"{{path}} has no split {{split!r}}. Choose one of: {{known}}")
        return (file.read_text(encoding="utf-8") for file in files[split])
    import datasets

    names = {{}}
    for name, paths in files.items():
        names[name] = [glob.escape(str(file)) for file in paths]
    rows = datasets.load_dataset(kind, data_files=names, split=split, streaming=STREAMING)
    return texts_of_rows(rows)
'''

_ROWS = '''
from collections.abc import Iterator
from typing import Any
import numpy
from autotune.shipped.labels import IGNORED_LABEL

def texts_of_rows(rows: Any) -> Iterator[Any]:
    """Yields the texts of TEXT_COLUMN; without it the tokens or the texts that the rows have.

    Without TEXT_COLUMN and tokens, the column is the one called text or the first one of strings.
    """
    rows = rows.with_format(None)
    string_types = ("string", "large_string", "string_view")
    has_strings = {}
    if rows.features is None:  # streamed: the types are unknown, so look at some values
        for row in rows.take(64):
            for name, value in row.items():
                has_strings[name] = has_strings.get(name, False) or isinstance(value, str)
    else:
        for name, feature in rows.features.items():
            has_strings[name] = getattr(feature, "dtype", "") in string_types
    columns = list(has_strings)
    text_columns = [name for name in columns if has_strings[name]]
    if TEXT_COLUMN is None and "input_ids" in columns and "input_ids" not in text_columns:
        names = ("input_ids", "labels", "attention_mask")
        yield from _samples(rows, [name for name in names if name in columns])
        return
    column = TEXT_COLUMN
    if column is None:
        column = "text" if "text" in text_columns or not text_columns else text_columns[0]
    for row in rows.select_columns([column]):
        if row[column]:
            yield row[column]


def _samples(rows: Any, columns: list[str]) -> Iterator[Any]:
    """Yields the tokens of each row, with -2 - token where a token is not a label.

    Tokens under a mask of 0 and tokens after the last label are dropped.
    """
    for row in rows.select_columns(columns):
        tokens = numpy.asarray(row["input_ids"] or [], dtype=numpy.int64)
        labels = tokens
        if row.get("labels") is not None:
            labels = numpy.asarray(row["labels"], dtype=numpy.int64)
        if row.get("attention_mask") is not None:
            is_visible = numpy.asarray(row["attention_mask"]) != 0
            tokens, labels = tokens[is_visible], labels[is_visible]
        trained_on = labels != IGNORED_LABEL
        end = int(trained_on.nonzero()[0].max(initial=-1)) + 1
        yield numpy.where(trained_on, tokens, -2 - tokens)[:end]
'''

_CHAT_ROWS = '''
from collections.abc import Iterator
from typing import Any
from autotune.shipped.chat_template import conversation_of, labelled_tokens, tools_of

CHAT_COLUMN = {column!r}


def texts_of_rows(rows: Any) -> Iterator[Any]:
    """Yields the tokens of each conversation, with -2 - token where a token is not an answer."""
    tokenizer, template = make_tokenizer(TEXT), make_chat_template()
    for row in rows.with_format(None):
        messages = conversation_of(row[CHAT_COLUMN])
        text, answers = template.with_answers(messages, tools=tools_of(row.get("tools")))
        tokens, offsets = tokenizer.encode_with_offsets(text)
        yield labelled_tokens(tokens, offsets, answers)
'''
