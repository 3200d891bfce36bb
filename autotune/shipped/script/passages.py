"""Units of texts that are packed into sequences: their passages."""

from collections.abc import Iterable, Iterator
from typing import Any

from autotune.shipped.text_parts import passages


def cut(documents: Iterable[Any]) -> Iterator[Any]:
    """Yields the passages of each text; a sample of tokens stays whole."""
    for document in documents:
        if isinstance(document, str):
            yield from passages([document])
        else:
            yield document
