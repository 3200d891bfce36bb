"""Sequences of texts that are padded: each begins with a text of its own."""

from typing import Any

import numpy

from autotune.shipped.script.units import is_full, units_of
from autotune.shipped.script.written import SEQUENCE_LENGTH, make_tokenizer


def tokens_of(text: str) -> tuple[list[Any], int]:
    """Returns both parts and the padding token.

    A part is int32 [samples, SEQUENCE_LENGTH + 1]; each text is a sample, padded with -1.
    """
    tokenizer: Any = None
    parts: tuple[list[Any], list[Any]] = ([], [])

    def has_all(part: bool) -> bool:
        return is_full(part, len(parts[part]), lambda sequences: sequences)

    for part, unit in units_of(text, has_all):
        sample = unit
        if isinstance(unit, bytes):
            if tokenizer is None:
                tokenizer = make_tokenizer(text)
            longest = SEQUENCE_LENGTH - len(tokenizer.beginning)
            tokens = tokenizer.encode([unit], longest=longest)[0][0]
            sample = numpy.concatenate([tokenizer.beginning, tokens])
        sample = sample.astype(numpy.int32)[:SEQUENCE_LENGTH]
        has_label = (sample[1:] >= 0).any()
        if has_label and not has_all(part):
            padding = (0, SEQUENCE_LENGTH + 1 - len(sample))
            parts[part].append(numpy.pad(sample, padding, constant_values=-1))
    nothing = numpy.zeros((0, SEQUENCE_LENGTH + 1), dtype=numpy.int32)
    samples = [numpy.stack(part) if part else nothing for part in parts]
    return samples, 0 if tokenizer is None else tokenizer.pad_token
