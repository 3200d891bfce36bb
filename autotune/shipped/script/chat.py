"""Sequences of conversations, or of prompts with their answers."""

from typing import Any

import numpy

from autotune.shipped.script.units import is_full, units_of
from autotune.shipped.script.written import SEQUENCE_LENGTH, make_tokenizer, sequences_of


def tokens_of(text: str) -> tuple[list[Any], int]:
    """Returns both parts and the padding token.

    A part is int32 [sequences, SEQUENCE_LENGTH + 1], without those that have no answer.
    """
    parts: tuple[list[Any], list[Any]] = ([], [])
    rests = [numpy.zeros(0, dtype=numpy.int32) for _ in parts]

    def has_all(part: bool) -> bool:
        return is_full(part, len(parts[part]), lambda sequences: sequences)

    for part, conversation in units_of(text, has_all):
        rows, rests[part] = sequences_of(rests[part], conversation.astype(numpy.int32))
        for row in rows:
            if (row[1:] >= 0).any() and not has_all(part):
                parts[part].append(row)
    nothing = numpy.zeros((0, SEQUENCE_LENGTH + 1), dtype=numpy.int32)
    rows_of_parts = [numpy.stack(part) if part else nothing for part in parts]
    return rows_of_parts, make_tokenizer(text).pad_token
