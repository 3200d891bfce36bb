"""Rows of several columns as training data: a prompt of them, and the answer, which is learned."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autotune.data.rows import Columns, values
from autotune.data.tokenizer import Tokenizer, load_tokenizer
from autotune.errors import InvalidDataset, InvalidInput
from autotune.shipped.invalid_row import InvalidRow
from autotune.shipped.prompts import answered_prompt
from autotune.shipped.token_encoding import Tokens
from autotune.spec.prompt_format import PromptFormat
from autotune.spec.workload import Workload


@dataclass(frozen=True, kw_only=True)
class PromptColumns:
    """The prompts and answers of a dataset as samples; can be iterated several times.

    A sample is int64 [tokens], encoded as in `token_file.py`: only answers are labels, unless the
    format says otherwise.
    """

    rows: Any
    format: PromptFormat
    columns: tuple[str, ...]
    """Those of the format that the dataset has."""
    workload: Workload

    def __iter__(self) -> Iterator[Tokens]:
        tokenizer, form = self._tokenizer, self.format.to_dict()

        def encode(text: str) -> list[int]:
            written = text.encode("utf-8", errors="replace")
            tokens: list[int] = tokenizer.encode([written], longest=None)[0][0].tolist()
            return tokens

        rows = values(self.rows, list(self.columns), dataset=self.workload.dataset)
        for number, row in enumerate(rows, start=1):
            try:
                yield answered_prompt(
                    dict(zip(self.columns, row, strict=True)),
                    form,
                    encode,
                    beginning=tokenizer.own_beginning.tolist(),
                    ending=tokenizer.separator.tolist(),
                )
            except InvalidRow as error:
                raise invalid_row(error, number, self.workload) from error

    @property
    def pad_token(self) -> int:
        return self._tokenizer.pad_token

    def check(self) -> None:
        """Raise InvalidInput if the workload's tokenizer cannot tokenize prompts."""
        _ = self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if self.workload.tokenizer == "bpe":
            raise InvalidInput(
                f"dataset {self.workload.dataset!r} has prompts and answers, and tokenizer 'bpe' "
                "is trained on plain text",
                hint="use --tokenizer bytes, model or the folder of a tokenizer",
            )
        return load_tokenizer(self.workload)


def invalid_row(error: InvalidRow, number: int, workload: Workload) -> InvalidDataset:
    """Returns the error for the row of that number."""
    message = f"row {number} of dataset {workload.dataset!r} {error.message}"
    return InvalidDataset(message, hint=error.hint)


def columns_of_format(format: PromptFormat, found: Columns, workload: Workload) -> tuple[str, ...]:
    """Returns the columns of a format that a dataset has.

    Raises InvalidDataset if it lacks one without which rows cannot be read.
    """
    there = (*found.texts, *found.lists, *found.others)
    missing = [name for name in format.columns if name not in there]
    if missing:
        raise InvalidDataset(
            f"dataset {workload.dataset!r} has no column {missing[0]!r}, which the prompt format "
            f"{format.name or 'that is given'} reads; its columns: {', '.join(there) or 'none'}",
            hint="name the columns that it has, the answer last: "
            "--prompt-format '{question}\\n{answer}'",
        )
    return tuple(name for name in (*format.columns, *format.optional_columns) if name in there)
