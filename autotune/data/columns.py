"""Select what to train on from the rows of a dataset: a column of text, or columns of tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy

from autotune.data.hub import reason_of
from autotune.data.token_file import IGNORED_LABEL, NO_TOKEN, Tokens, read_token_of
from autotune.errors import InvalidDataset
from autotune.spec.workload import Workload

TOKENS, LABELS, MASK = "input_ids", "labels", "attention_mask"
"""Names of the columns of a tokenized dataset in transformers."""

_STRING_TYPES = {"string", "large_string", "string_view"}
_SAMPLED_ROWS = 64
"""Rows that are read to find the columns, if a streamed dataset does not declare them."""
_ROWS_PER_READ = 64


@dataclass(frozen=True, kw_only=True)
class TextColumn:
    """The texts of a column, without empty rows; can be iterated several times."""

    rows: Any
    column: str
    dataset: str

    def __iter__(self) -> Iterator[str]:
        for (text,) in _values(self.rows, [self.column], dataset=self.dataset):
            if text:
                yield text


@dataclass(frozen=True, kw_only=True)
class TokenColumn:
    """The samples of a tokenized dataset, int64 [tokens] each, encoded as in `token_file.py`.

    Tokens with mask 0 are dropped; a token with label -100 is input but not trained on.
    """

    rows: Any
    columns: tuple[str, ...]
    workload: Workload

    def __iter__(self) -> Iterator[Tokens]:
        for row in _values(self.rows, list(self.columns), dataset=self.workload.dataset):
            yield self._sample(dict(zip(self.columns, row, strict=True)))

    def _sample(self, row: dict[str, Any]) -> Tokens:
        # A single number has no length; `_array` rejects it.
        default = row[TOKENS] if isinstance(row[TOKENS], list) else []
        tokens = self._array(row.get(TOKENS), default=default)
        labels = self._array(row.get(LABELS), default=default)
        mask = self._array(row.get(MASK), default=default)
        if row.get(MASK) is not None:
            tokens, labels = tokens[mask != 0], labels[mask != 0]
        self._check(tokens, labels)
        trained_on = labels != IGNORED_LABEL
        # Nothing is learned from the tokens after the last label.
        end = int(trained_on.nonzero()[0].max(initial=-1)) + 1
        return numpy.where(trained_on, tokens, read_token_of(tokens))[:end]

    def _array(self, values: Any, *, default: list[int]) -> Tokens:
        """Return `values`, or `default` for None, as int64 [tokens], of the length of `default`."""
        try:
            array = numpy.asarray(default if values is None else values, dtype=numpy.int64)
        except (TypeError, ValueError, OverflowError):
            array = numpy.zeros((0, 0), dtype=numpy.int64)
        if array.shape != (len(default),):
            raise InvalidDataset(
                f"dataset {self.workload.dataset!r} has rows whose {TOKENS}, {LABELS} and {MASK} "
                "are not whole numbers or differ in length",
                hint="save it as the tokenizer of transformers returns it, "
                "or name a column of text",
            )
        return array

    def _check(self, tokens: Tokens, labels: Tokens) -> None:
        name, vocab_size = self.workload.dataset, self.workload.vocab_size
        largest = int(tokens.max(initial=NO_TOKEN))
        if largest >= vocab_size or tokens.min(initial=0) < 0:
            invalid = largest if largest >= vocab_size else int(tokens.min())
            raise InvalidDataset(
                f"dataset {name!r} has the token {invalid}, "
                f"the model's vocabulary is 0 to {vocab_size - 1}",
                hint="use --vocab-size with the size of the tokenizer it was made with",
            )
        if (labels != numpy.where(labels == IGNORED_LABEL, labels, tokens)).any():
            raise InvalidDataset(
                f"dataset {name!r} has labels that are not its {TOKENS}",
                hint=f"labels must equal {TOKENS}, or be {IGNORED_LABEL} for tokens to ignore",
            )


def documents_of(rows: Any, workload: Workload) -> TextColumn | TokenColumn:
    """Return the documents in `rows`.

    These are the text column that the workload names, else the tokens, else the column `text`, else
    the only column of strings. Raises InvalidDataset, with the existing columns, for none of them.
    """
    if hasattr(rows, "with_format"):
        rows = rows.with_format(None)  # a saved dataset may return its rows as tensors
    texts, others = _columns_of(rows, dataset=workload.dataset)
    if workload.text_column is None and TOKENS in others:
        columns = tuple(name for name in (TOKENS, LABELS, MASK) if name in others)
        return TokenColumn(rows=rows, columns=columns, workload=workload)
    column = workload.text_column
    if column is None and "text" in texts:
        column = "text"
    elif column is None and len(texts) == 1:
        column = texts[0]
    if column not in texts:
        missing = f"no text column {column!r}" if column else "no single text column to choose"
        raise InvalidDataset(
            f"dataset {workload.dataset!r} has {missing}",
            hint=f"name one with --text-column; columns of text: {', '.join(texts) or 'none'}",
        )
    return TextColumn(rows=rows, column=column, dataset=workload.dataset)


def _columns_of(rows: Any, *, dataset: str) -> tuple[list[str], list[str]]:
    """Return the names of the columns of strings, and of the other columns."""
    if rows.features is not None:
        is_text = {
            name: getattr(feature, "dtype", "") in _STRING_TYPES
            for name, feature in rows.features.items()
        }
    else:
        is_text = {}
        for row in _iterated(rows.take(_SAMPLED_ROWS), dataset=dataset):
            for name, value in row.items():
                is_text[name] = is_text.get(name, False) or isinstance(value, str)
    texts = [name for name, text in is_text.items() if text]
    others = [name for name, text in is_text.items() if not text]
    return texts, others


def _values(rows: Any, columns: list[str], *, dataset: str) -> Iterator[tuple[Any, ...]]:
    batches = rows.select_columns(columns).iter(batch_size=_ROWS_PER_READ)
    for batch in _iterated(batches, dataset=dataset):
        yield from zip(*(batch[name] for name in columns), strict=True)


def _iterated(rows: Any, *, dataset: str) -> Iterator[Any]:
    """Yield from `rows`; an error while reading, as of a streamed dataset, is an InvalidDataset."""
    try:
        yield from rows
    except Exception as error:
        raise unreadable(dataset, error) from error


def unreadable(dataset: str, error: Exception, *, kind: str = "rows of text") -> InvalidDataset:
    """Return the error for a dataset that cannot be read as `kind`."""
    return InvalidDataset(
        f"dataset {dataset!r} cannot be read as {kind}: {reason_of(error)}",
        hint="check that the file is complete and that its suffix is right",
    )
