"""Select what to train on from the rows of a dataset: text, tokens or conversations."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy

from autotune.data.chat import CHAT_COLUMNS, TOOLS, ChatColumn
from autotune.data.rows import columns_of, values
from autotune.errors import InvalidDataset
from autotune.shipped.labels import IGNORED_LABEL
from autotune.shipped.token_encoding import NO_TOKEN, Tokens, read_token_of
from autotune.spec.workload import Workload

TOKENS, LABELS, MASK = "input_ids", "labels", "attention_mask"
"""Names of the columns of a tokenized dataset in transformers."""


@dataclass(frozen=True, kw_only=True)
class TextColumn:
    """The texts of a column, without empty rows; can be iterated several times."""

    rows: Any
    column: str
    dataset: str

    def __iter__(self) -> Iterator[str]:
        for (text,) in values(self.rows, [self.column], dataset=self.dataset):
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
        for row in values(self.rows, list(self.columns), dataset=self.workload.dataset):
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


def documents_of(rows: Any, workload: Workload) -> TextColumn | TokenColumn | ChatColumn:
    """Return the documents in `rows`.

    These are the column of text or conversations that the workload names, else the tokens, else the
    conversations, else the column `text`, else the only column of strings. Raises InvalidDataset,
    with the existing columns, for none of them.
    """
    if hasattr(rows, "with_format"):
        rows = rows.with_format(None)  # a saved dataset may return its rows as tensors
    found = columns_of(rows, dataset=workload.dataset)
    if workload.text_column is None and TOKENS in (*found.lists, *found.others):
        names = (*found.lists, *found.others)
        columns = tuple(name for name in (TOKENS, LABELS, MASK) if name in names)
        return TokenColumn(rows=rows, columns=columns, workload=workload)
    named = CHAT_COLUMNS if workload.text_column is None else (workload.text_column,)
    conversations = next((name for name in named if name in found.lists), None)
    if conversations is not None:
        has_tools = TOOLS in (*found.texts, *found.lists)
        chat = ChatColumn(rows=rows, column=conversations, has_tools=has_tools, workload=workload)
        chat.check()
        return chat
    texts, column = found.texts, workload.text_column
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
