"""Cuts documents into texts to tokenize, each of which is trained on or held out."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

PASSAGE_CHARACTERS = 4096
HELD_OUT_ONE_IN = 10
CHARACTERS_PER_TOKEN = 64
"""Upper bound for every tokenizer; characters beyond it cannot be part of a padded sample."""
TRAINED_ON_BYTES_PER_TOKEN = 8
"""Bytes of streamed text that a BPE is trained on, per token that the steps need."""
TRAIN, HELD_OUT = False, True


def passages(documents: Iterable[str]) -> Iterator[bytes]:
    """Yield each document as UTF-8, in passages of at most 4,096 characters."""
    for document in documents:
        for start in range(0, len(document), PASSAGE_CHARACTERS):
            yield document[start : start + PASSAGE_CHARACTERS].encode("utf-8", errors="replace")


def beginnings(documents: Iterable[str], *, sequence_length: int) -> Iterator[bytes]:
    """Yield as much of each document as a sample could contain, as UTF-8."""
    for document in documents:
        yield document[: CHARACTERS_PER_TOKEN * sequence_length].encode("utf-8", errors="replace")


def is_held_out(passage: bytes) -> bool:
    """Whether a passage is held out, decided by its hash."""
    return int.from_bytes(hashlib.sha256(passage).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def assigned(
    train: Iterable[Any], held_out: Iterable[Any] | None, *, is_full: Callable[[bool], bool]
) -> Iterator[Any]:
    """Yield (is held out, unit) for every unit until the parts are full."""
    if held_out is None:
        for unit in train:
            if is_full(TRAIN) and is_full(HELD_OUT):
                return
            yield is_held_out(unit if isinstance(unit, bytes) else unit.tobytes()), unit
        return
    for part, units in ((TRAIN, train), (HELD_OUT, held_out)):
        for unit in units:
            if is_full(part):
                break
            yield part, unit


def up_to(size_bytes: int, texts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield texts until their total size reaches `size_bytes`."""
    for text in texts:
        yield text
        size_bytes -= len(text)
        if size_bytes <= 0:
            return
