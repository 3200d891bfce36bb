"""The prompts that the rows of a data set are put into, with their answers."""

from collections.abc import Iterator
from typing import Any

from autotune.shipped.prompts import answered_prompt
from autotune.shipped.script.written import PROMPT_FORMAT, TEXT, make_tokenizer


def texts_of_rows(rows: Any) -> Iterator[Any]:
    """Yields the tokens of each row, with -2 - token where a token is not learned."""
    tokenizer = make_tokenizer(TEXT)

    def encode(text: str) -> list[int]:
        written = text.encode("utf-8", errors="replace")
        tokens: list[int] = tokenizer.encode([written], longest=None)[0][0].tolist()
        return tokens

    beginning, ending = tokenizer.own_beginning.tolist(), tokenizer.separator.tolist()
    for row in rows.with_format(None):
        yield answered_prompt(row, PROMPT_FORMAT, encode, beginning=beginning, ending=ending)
