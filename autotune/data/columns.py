"""What of a dataset's rows is trained on: the text of one column, or the tokens of a set that is already tokenized."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy

from autotune.data.hub import reason_of
from autotune.data.token_file import IGNORED_LABEL, NO_TOKEN, Tokens, read_token_of
from autotune.errors import InvalidDataset
from autotune.spec.workload import Workload

TOKENS, LABELS, MASK = "input_ids", "labels", "attention_mask"
"""What transformers calls the columns of a tokenized set."""

_STRING_TYPES = {"string", "large_string", "string_view"}
_LOOKED_AT = 64
"""Rows looked at where streaming leaves the columns unknown."""
_READ_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class TextColumn:
    """The texts of a column, one after the other, as often as they are asked for; rows without text left out."""

    rows: Any
    column: str
    dataset: str

    def __iter__(self) -> Iterator[str]:
        for (text,) in _values(self.rows, [self.column], dataset=self.dataset):
            if text:
                yield text


@dataclass(frozen=True, kw_only=True)
class TokenColumn:
    """The samples of a tokenized set, int64 [tokens] each, as padded text has them (`token_file.py`).

    Tokens under a mask of 0 are left out; a token with label -100 is read and not trained on.
    """

    rows: Any
    columns: tuple[str, ...]
    workload: Workload

    def __iter__(self) -> Iterator[Tokens]:
        for row in _values(self.rows, list(self.columns), dataset=self.workload.dataset):
            yield self._sample(dict(zip(self.columns, row, strict=True)))

    def _sample(self, row: dict[str, Any]) -> Tokens:
        tokens, labels, mask = (
            self._array(row.get(name), like=row[TOKENS] or []) for name in (TOKENS, LABELS, MASK)
        )
        if row.get(MASK) is not None:
            tokens, labels = tokens[mask != 0], labels[mask != 0]
        self._check(tokens, labels)
        trained_on = labels != IGNORED_LABEL
        end = (
            int(trained_on.nonzero()[0].max(initial=-1)) + 1
        )  # nothing is learned from what follows the last label
        return numpy.where(trained_on, tokens, read_token_of(tokens))[:end]

    def _array(self, values: Any, *, like: list[int]) -> Tokens:
        """int64 [tokens] of `values`, or of `like` where there are none."""
        try:
            array = numpy.asarray(like if values is None else values, dtype=numpy.int64)
        except (TypeError, ValueError, OverflowError):
            array = numpy.zeros((0, 0), dtype=numpy.int64)
        if array.shape != (len(like),):
            raise InvalidDataset(
                f"dataset {self.workload.dataset!r} has rows whose {TOKENS}, {LABELS} and {MASK} are no whole numbers "
                "or differ in length",
                hint="save it as the tokenizer of transformers returns it, or name a column of text",
            )
        return array

    def _check(self, tokens: Tokens, labels: Tokens) -> None:
        name, vocab_size = self.workload.dataset, self.workload.vocab_size
        largest = int(tokens.max(initial=NO_TOKEN))
        if largest >= vocab_size or tokens.min(initial=0) < 0:
            wrong = largest if largest >= vocab_size else int(tokens.min())
            raise InvalidDataset(
                f"dataset {name!r} has the token {wrong}, the model's vocabulary is 0 to {vocab_size - 1}",
                hint="use --vocab-size with the size of the tokenizer it was made with",
            )
        if (labels != numpy.where(labels == IGNORED_LABEL, labels, tokens)).any():
            raise InvalidDataset(
                f"dataset {name!r} has labels that are not its {TOKENS}",
                hint=f"labels must repeat {TOKENS}, or be {IGNORED_LABEL} where nothing is to be learned",
            )


def documents_of(rows: Any, workload: Workload) -> TextColumn | TokenColumn:
    """The text column that is named, else the tokens, else the column called text, else the only one of strings.

    Raises InvalidDataset, with the columns there are, where none of that is there.
    """
    if hasattr(rows, "with_format"):
        rows = rows.with_format(None)  # a saved set may come with its rows as tensors
    texts, others = _columns_of(rows, dataset=workload.dataset)
    if workload.text_column is None and TOKENS in others:
        columns = tuple(name for name in (TOKENS, LABELS, MASK) if name in others)
        return TokenColumn(rows=rows, columns=columns, workload=workload)
    wanted = workload.text_column
    if wanted is None and ("text" in texts or len(texts) == 1):
        wanted = "text" if "text" in texts else texts[0]
    if wanted not in texts:
        raise InvalidDataset(
            f"dataset {workload.dataset!r} has "
            + (f"no text column {wanted!r}" if wanted else "no single text column to choose"),
            hint=f"name one with --text-column; columns of text: {', '.join(texts) or 'none'}",
        )
    return TextColumn(rows=rows, column=wanted, dataset=workload.dataset)


def _columns_of(rows: Any, *, dataset: str) -> tuple[list[str], list[str]]:
    """Names of the columns of strings, and of the others."""
    if rows.features is not None:
        is_text = {
            name: getattr(feature, "dtype", "") in _STRING_TYPES
            for name, feature in rows.features.items()
        }
    else:
        is_text = {}
        for row in _iterated(rows.take(_LOOKED_AT), dataset=dataset):
            for name, value in row.items():
                is_text[name] = is_text.get(name, False) or isinstance(value, str)
    return [name for name, text in is_text.items() if text], [
        name for name, text in is_text.items() if not text
    ]


def _values(rows: Any, columns: list[str], *, dataset: str) -> Iterator[tuple[Any, ...]]:
    batches = rows.select_columns(columns).iter(batch_size=_READ_AT_ONCE)
    for batch in _iterated(batches, dataset=dataset):
        yield from zip(*(batch[name] for name in columns), strict=True)


def _iterated(rows: Any, *, dataset: str) -> Iterator[Any]:
    """Goes through `rows`; what goes wrong in reading them, which streaming does only now, is an InvalidDataset."""
    try:
        yield from rows
    except Exception as error:
        raise unreadable(dataset, error) from error


def unreadable(dataset: str, error: Exception, *, kind: str = "rows of text") -> InvalidDataset:
    return InvalidDataset(
        f"dataset {dataset!r} cannot be read as {kind}: {reason_of(error)}",
        hint="check that the file is complete and of the kind its name says",
    )
