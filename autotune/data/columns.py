"""Select what to train on from the rows of a dataset: text, tokens or conversations."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy

from autotune.data.chat import CHAT_COLUMNS, SYSTEM, TOOLS, ChatColumn
from autotune.data.prompts import PromptColumns, columns_of_format
from autotune.data.rows import Columns, columns_of, values
from autotune.errors import InvalidDataset
from autotune.shipped.chat_template import InvalidConversation, conversation_of
from autotune.shipped.labels import IGNORED_LABEL
from autotune.shipped.token_encoding import NO_TOKEN, Tokens, read_token_of
from autotune.spec.prompt_format import PromptFormat, detected, named, prompt_formats
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
        mask = self._array(row.get(MASK), default=default, kinds="iub")
        if row.get(MASK) is not None:
            tokens, labels = tokens[mask != 0], labels[mask != 0]
        self._check(tokens, labels)
        trained_on = labels != IGNORED_LABEL
        # Nothing is learned from the tokens after the last label.
        end = int(trained_on.nonzero()[0].max(initial=-1)) + 1
        return numpy.where(trained_on, tokens, read_token_of(tokens))[:end]

    def _array(self, values: Any, *, default: list[int], kinds: str = "iu") -> Tokens:
        """Returns `values`, or `default` for None, as int64 [tokens], of the length of `default`.

        `kinds` are the accepted ones of numpy's dtypes.
        """
        given = default if values is None else values
        try:
            array = numpy.asarray(given)
        except (TypeError, ValueError, OverflowError):
            array = numpy.zeros((0, 0))
        is_whole = not array.size or array.dtype.kind in kinds
        if not is_whole or array.shape != (len(default),):
            values_of_row = given if isinstance(given, list) else [given]
            others = [value for value in values_of_row if type(value) is not int]
            example = f" (such as {others[0]!r})" if others else ""
            raise InvalidDataset(
                f"dataset {self.workload.dataset!r} has rows whose {TOKENS}, {LABELS} and {MASK} "
                f"are not whole numbers or differ in length{example}",
                hint="save it as the tokenizer of transformers returns it, "
                "or name a column of text",
            )
        return array.astype(numpy.int64)

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


RowDocuments = TextColumn | TokenColumn | ChatColumn | PromptColumns


def documents_of(rows: Any, workload: Workload) -> RowDocuments:
    """Returns the documents in `rows`.

    These are what the workload's format of prompts or the column that it names says, else the
    tokens, else the conversations, else the column `text`, else the columns that have a format by
    their names, else the only column of strings. Raises InvalidDataset, with the existing columns,
    for none of them.
    """
    if hasattr(rows, "with_format"):
        rows = rows.with_format(None)  # a saved dataset may return its rows as tensors
    found = columns_of(rows, dataset=workload.dataset)
    format = workload.prompts or _detected_format(found, workload)
    if format is not None:
        return _prompts(rows, format, found, workload)
    if workload.text_column is None and TOKENS in (*found.lists, *found.others):
        names = (*found.lists, *found.others)
        columns = tuple(name for name in (TOKENS, LABELS, MASK) if name in names)
        return TokenColumn(rows=rows, columns=columns, workload=workload)
    named = CHAT_COLUMNS if workload.text_column is None else (workload.text_column,)
    conversations = next((name for name in named if name in found.lists), None)
    if conversations is not None:
        _check_holds_messages(rows, conversations, workload)
        columns = (*found.texts, *found.lists)
        beside = tuple(name for name in (TOOLS, SYSTEM) if name in columns)
        chat = ChatColumn(rows=rows, column=conversations, beside=beside, workload=workload)
        chat.check()
        return chat
    if workload.text_column is None:
        _check_is_text(found, workload)
    texts, column = found.texts, workload.text_column
    if column is None and "text" in texts:
        column = "text"
    elif column is None and len(texts) == 1 and not _holds_records(rows, found, workload):
        column = texts[0]
    if column is not None and column in texts:
        _check_no_conversations(rows, column, workload)
        return TextColumn(rows=rows, column=column, dataset=workload.dataset)
    missing = f"no text column {column!r}" if column else "no single text column to choose"
    hint = (
        "name the one to learn, without the others, with --text-column, or put several into a "
        f"prompt with --prompt-format; columns of text: {', '.join(texts) or 'none'}"
    )
    if (column or "text") in found.others:
        missing = f"values in {column or 'text'} that are not text"
    if found.lists and len(texts) < 2:
        hint = (
            f"it has lists in {', '.join(found.lists)}: rename a column of tokens to {TOKENS}, one "
            "of conversations to messages, and write each record of a list of records as a row"
        )
    raise InvalidDataset(f"dataset {workload.dataset!r} has {missing}", hint=hint)


def _detected_format(found: Columns, workload: Workload) -> PromptFormat | None:
    """Returns the format that rows have by the names of their columns of text."""
    if workload.text_column is not None:
        return None
    # A column without a value in any row has no type.
    format = detected((*found.texts, *found.lists)) or detected(
        (*found.texts, *found.lists, *found.others)
    )
    if format is not None and any(name in found.lists for name in format.columns):
        return named("prompt-completion-chat") if format == named("prompt-completion") else None
    return format


def _prompts(
    rows: Any, format: PromptFormat, found: Columns, workload: Workload
) -> ChatColumn | PromptColumns:
    columns = columns_of_format(format, found, workload)
    documents: ChatColumn | PromptColumns
    if format.makes_messages:
        beside = tuple(name for name in found.texts + found.lists if name == TOOLS)
        documents = ChatColumn(
            rows=rows, column=None, beside=columns + beside, format=format, workload=workload
        )
    else:
        documents = PromptColumns(rows=rows, format=format, columns=columns, workload=workload)
    documents.check()
    return documents


_PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("query", "answer"),
    ("input", "output"),
    ("input", "target"),
    ("source", "target"),
)
"""Names of two columns that belong together: what is asked, and what is answered."""
_PREFERENCES = ("chosen", "rejected")


def _check_is_text(found: Columns, workload: Workload) -> None:
    """Raise InvalidDataset for columns of which a single one would be half of what is learned."""
    names = (*found.texts, *found.lists)
    if all(name in names for name in _PREFERENCES):
        raise InvalidDataset(
            f"dataset {workload.dataset!r} has preferences, the columns chosen and rejected, and a "
            "search trains on one text or conversation a row",
            hint="to learn the chosen ones only, name them: --text-column chosen"
            + ("; a prompt in a column of its own is then not read" if "prompt" in names else ""),
        )
    if "text" in found.texts:
        return
    pair = next((pair for pair in _PAIRS if all(name in names for name in pair)), None)
    if pair is not None:
        asked, answered = pair
        usual = [name for name in prompt_formats() if set(named(name).columns) == set(pair)]
        format = usual[0] if usual else f"'{{{asked}}}\\n{{{answered}}}'"
        hint = f"say how they are put together, the answer last: --prompt-format {format}"
        if asked in found.lists and answered in found.lists:
            hint = f"join the messages of {asked} and {answered} in one column called messages"
        raise InvalidDataset(
            f"dataset {workload.dataset!r} has {asked} and {answered} in two columns, and one "
            "column alone is half of what is to be learned",
            hint=hint,
        )


def _check_holds_messages(rows: Any, column: str, workload: Workload) -> None:
    """Raise InvalidDataset for a named column whose lists are of numbers, which are tokens."""
    for (value,) in values(rows, [column], dataset=workload.dataset):
        if value and isinstance(value, list) and isinstance(value[0], int | float):
            raise InvalidDataset(
                f"dataset {workload.dataset!r} has lists of numbers in {column}, and no text or "
                "conversations",
                hint=f"if they are tokens, rename the column to {TOKENS}",
            )
        if value:
            return


def _holds_records(rows: Any, found: Columns, workload: Workload) -> bool:
    """Returns whether a row holds a list of objects: the rows of the dataset may be in there."""
    for row in values(rows, list(found.lists), dataset=workload.dataset):
        return any(isinstance(value, list) and isinstance(value[0], dict) for value in row if value)
    return False


def _check_no_conversations(rows: Any, column: str, workload: Workload) -> None:
    """Raise InvalidDataset for conversations that are written as the text of their JSON."""
    for (text,) in values(rows, [column], dataset=workload.dataset):
        if not text:
            continue
        try:
            conversation_of(json.loads(text))
        except (ValueError, RecursionError, InvalidConversation):
            return
        raise InvalidDataset(
            f"dataset {workload.dataset!r} has conversations in {column} as text, whose JSON would "
            "be learned",
            hint=f"write each as a list of messages, as json.loads({column}) returns it",
        )
