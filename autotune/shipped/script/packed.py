"""Sequences of texts that are packed: cut from one stream of tokens."""

from typing import Any

import numpy
import torch
from torch import Tensor

from autotune.shipped.script.units import is_full, units_of
from autotune.shipped.script.written import SEQUENCE_LENGTH, make_tokenizer


def tokens_of(text: str) -> tuple[list[Any], int]:
    """Returns both parts and the padding token.

    A part is one stream of tokens, int32 [tokens], with the tokenizer's separator between texts.
    """
    tokenizer: Any = None
    parts: tuple[list[Any], list[Any]] = ([], [])
    lengths = [0, 0]

    def has_all(part: bool) -> bool:
        return is_full(part, lengths[part], lambda sequences: sequences * SEQUENCE_LENGTH + 1)

    for part, unit in units_of(text, has_all):
        if tokenizer is None and isinstance(unit, bytes):
            tokenizer = make_tokenizer(text)
        tokens = tokenizer.encode([unit], longest=None)[0][0] if isinstance(unit, bytes) else unit
        if has_all(part) or not len(tokens):
            continue
        added = [tokenizer.separator, tokens] if parts[part] and tokenizer is not None else [tokens]
        parts[part].extend(added)
        lengths[part] += sum(map(len, added))
    nothing = numpy.zeros(0, dtype=numpy.int32)
    streams = [numpy.concatenate([nothing, *part]).astype(numpy.int32) for part in parts]
    return streams, 0 if tokenizer is None else tokenizer.pad_token


class Sequences:
    """Sequences of a stream of tokens, in batches."""

    def __init__(self, tokens: Any, pad_token: int) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // SEQUENCE_LENGTH

    def batch(self, indices: Any) -> tuple[Tensor, Tensor]:
        """Returns tokens and labels, int64 [sequences, length] each; a label is the next token."""
        starts = [int(index) * SEQUENCE_LENGTH for index in indices]
        rows = numpy.stack([self.tokens[start : start + SEQUENCE_LENGTH + 1] for start in starts])
        both = torch.from_numpy(rows.astype(numpy.int64))
        return both[:, :-1], both[:, 1:]

    def tokens_per_sequence(self) -> float:
        return SEQUENCE_LENGTH
