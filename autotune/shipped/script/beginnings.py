"""Units of texts that are padded to sequences: their beginnings."""

from collections.abc import Iterable, Iterator
from typing import Any

from autotune.shipped.script.written import SEQUENCE_LENGTH
from autotune.shipped.text_parts import beginnings


def cut(documents: Iterable[Any]) -> Iterator[Any]:
    """Yields as much of each text as a sample could contain; a sample of tokens stays whole."""
    for document in documents:
        if isinstance(document, str):
            yield from beginnings([document], sequence_length=SEQUENCE_LENGTH)
        else:
            yield document
