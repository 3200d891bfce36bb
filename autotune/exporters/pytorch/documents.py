"""Where an exported script has its text from: `documents(name, split=...)`, as `autotune/data/sources.py` reads it.

Which files belong to a split, and which columns count, is only seen where the data is: the script
decides it as a study does.
"""

from autotune.exporters.pytorch.pieces import Piece, own_source, piece
from autotune.spec.workload import STANDARD_LIBRARY_TEXT, Workload

_ANY = "from typing import Any"
_ITERABLE = "from collections.abc import Iterable"
_ITERATOR = "from collections.abc import Iterator"
_PATH = "from pathlib import Path"


def document_pieces(workload: Workload) -> list[Piece]:
    """`documents(name, split=...)` gives texts, or the tokens of a set that is tokenized."""
    is_default = workload.dataset == STANDARD_LIBRARY_TEXT
    wants_splits = workload.held_out_split is not None or workload.dataset_split != "train"
    python_docs = (
        f"    if name == {STANDARD_LIBRARY_TEXT!r}:\n        return python_docs()\n"
        if is_default
        else ""
    )
    text = _DOCUMENTS.format(
        python_docs=python_docs,
        config=workload.dataset_config,
        streaming=workload.streaming,
        wants_splits=wants_splits,
        column=workload.text_column,
    )
    files = ("READERS", "_ALL", "_files_in", "_files_named_by_split", "_resolved")
    return [
        *([_python_docs()] if is_default else []),
        own_source("data.sources", *files, imports=(_PATH,)),
        piece(text, "import glob", _PATH, _ANY, _ITERABLE),
        piece(_ROWS, "import numpy", _ANY, _ITERATOR),
    ]


def _python_docs() -> Piece:
    names = (
        "_NOT_DOCUMENTATION",
        "_BEFORE_DOCSTRING",
        "documents",
        "_module_docstrings",
        "_docstring",
    )
    imports = (
        "import ast",
        "import sysconfig",
        "import tokenize",
        "from pydoc_data.topics import topics",
    )
    standard = own_source("data.python_docs", *names, imports=(*imports, _PATH, _ITERATOR))
    return Piece(standard.text.replace("def documents()", "def python_docs()"), standard.imports)


_DOCUMENTS = '''
DATASET_CONFIG: str | None = {config!r}
TEXT_COLUMN: str | None = {column!r}
STREAMING = {streaming}
WANTS_SPLITS = {wants_splits}


def documents(name: str, *, split: str) -> Iterable[Any]:
    """Local text, jsonl, csv or parquet files, a folder of them or of `save_to_disk`, or a name on the hub."""
{python_docs}    path = Path(name).expanduser()
    is_saved = any((path / file).exists() for file in ("state.json", "dataset_dict.json"))
    if path.is_file() or (path.is_dir() and not is_saved and DATASET_CONFIG is None):
        return _of_files(path, split=split)
    import datasets

    if not is_saved:
        where = str(path) if path.is_dir() else name
        return of_rows(datasets.load_dataset(where, DATASET_CONFIG, split=split, streaming=STREAMING))
    rows = datasets.load_from_disk(str(path))
    return of_rows(rows[split] if isinstance(rows, datasets.DatasetDict) else rows)


def _of_files(path: Path, *, split: str) -> Iterable[Any]:
    everything = [path] if path.is_file() else _files_in(path)
    kinds = {{READERS.get(file.suffix.lower()) for file in everything}}
    if len(kinds) != 1 or kinds == {{None}}:
        raise SystemExit(f"{{path}} holds no files of one kind that can be read: {{', '.join(READERS)}}")
    splits = {{}} if path.is_file() else _files_named_by_split(path, everything)
    is_laid_out = _ALL in splits and {{file for files in splits.values() for file in files}} == set(everything)
    files = splits if splits and (WANTS_SPLITS or is_laid_out) else {{_ALL: everything}}
    [kind] = kinds
    if kind == "text":
        if split not in files:
            raise SystemExit(f"{{path}} has no split {{split!r}}, but {{', '.join(files)}}")
        return (file.read_text(encoding="utf-8") for file in files[split])
    import datasets

    names = {{part: [glob.escape(str(file)) for file in of_part] for part, of_part in files.items()}}
    return of_rows(datasets.load_dataset(kind, data_files=names, split=split, streaming=STREAMING))
'''

_ROWS = '''
def of_rows(rows: Any) -> Iterator[Any]:
    """The column that is named, else the tokens, else the column called text, else the only one of strings."""
    rows = rows.with_format(None)
    features = {name: getattr(feature, "dtype", "") for name, feature in (rows.features or {}).items()}
    texts = [name for name, kind in features.items() if kind in ("string", "large_string", "string_view")]
    if rows.features is None:  # streamed
        seen = [(name, value) for row in rows.take(64) for name, value in row.items()]
        texts = [name for name in dict(seen) if any(isinstance(value, str) for other, value in seen if other == name)]
        features = dict(seen)
    if TEXT_COLUMN is None and "input_ids" in features and "input_ids" not in texts:
        yield from _samples(rows, [name for name in ("input_ids", "labels", "attention_mask") if name in features])
        return
    column = TEXT_COLUMN or ("text" if "text" in texts or not texts else texts[0])
    yield from (row[column] for row in rows.select_columns([column]) if row[column])


def _samples(rows: Any, columns: list[str]) -> Iterator[Any]:
    """Tokens; -2 - token where it is no label. What is under a mask of 0, or behind the last label, is left out."""
    for row in rows.select_columns(columns):
        tokens = numpy.asarray(row["input_ids"] or [], dtype=numpy.int64)
        labels = tokens if row.get("labels") is None else numpy.asarray(row["labels"], dtype=numpy.int64)
        if row.get("attention_mask") is not None:
            kept = numpy.asarray(row["attention_mask"]) != 0
            tokens, labels = tokens[kept], labels[kept]
        trained_on = labels != IGNORED_LABEL
        end = int(trained_on.nonzero()[0].max(initial=-1)) + 1
        yield numpy.where(trained_on, tokens, -2 - tokens)[:end]
'''
