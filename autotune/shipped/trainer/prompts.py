"""Samples for Trainer whose labels are the answers to prompts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from autotune.shipped.prompts import answered_prompt
from autotune.shipped.token_encoding import Tokens


def answered_prompts(
    rows: Iterable[Any],
    form: Mapping[str, Any],
    encode: Callable[[str], Sequence[int]],
    *,
    beginning: Sequence[int],
    ending: Sequence[int],
) -> Iterator[Tokens]:
    """Yields the tokens of each row, with -2 - token for those that are not learned."""
    for row in rows:
        yield answered_prompt(row, form, encode, beginning=beginning, ending=ending)
