"""The texts of a script: which are trained on, and which are held out."""

from collections.abc import Callable, Iterator
from typing import Any

from autotune.shipped.script.written import (
    DATASET_SPLIT,
    EVALUATION_SEQUENCES,
    GLOBAL_BATCH,
    HELD_OUT_SPLIT,
    STEPS,
    STREAMING,
    cut,
    read_documents,
)
from autotune.shipped.text_parts import HELD_OUT, assigned


def units_of(name: str, is_full: Callable[[bool], bool]) -> Iterator[tuple[bool, Any]]:
    """Yields (is held out, unit) until both parts are full.

    A unit is a text in UTF-8 or a sample of tokens. It belongs to one part as a whole.
    """
    train = cut(read_documents(name, split=DATASET_SPLIT))
    held_out = None
    if HELD_OUT_SPLIT is not None:
        held_out = cut(read_documents(name, split=HELD_OUT_SPLIT))
    return assigned(train, held_out, is_full=is_full)


def is_full(part: bool, length: int, length_of: Callable[[int], int]) -> bool:
    """Whether a part has all the text that STEPS or the held-out sequences use.

    A text that is not streamed is read whole. A longer training repeats a streamed one.
    """
    sequences = EVALUATION_SEQUENCES if part == HELD_OUT else STEPS * GLOBAL_BATCH
    return STREAMING and length >= length_of(sequences)
