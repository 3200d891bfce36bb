"""Conversations that are packed into sequences."""

from typing import Any

import numpy

from autotune.shipped.script.written import SEQUENCE_LENGTH


def sequences_of(rest: Any, conversation: Any) -> tuple[list[Any], Any]:
    """Returns sequences from the stream of `rest` and the conversation, and what is left of it.

    They overlap by one token: the last label of one is the first token of the next.
    """
    stream = numpy.concatenate([rest, conversation])
    starts = range(0, len(stream) - SEQUENCE_LENGTH, SEQUENCE_LENGTH)
    rows = [stream[start : start + SEQUENCE_LENGTH + 1] for start in starts]
    return rows, stream[len(rows) * SEQUENCE_LENGTH :]
