"""Conversations that are padded to sequences."""

from typing import Any

import numpy

from autotune.shipped.script.written import SEQUENCE_LENGTH


def sequences_of(rest: Any, conversation: Any) -> tuple[list[Any], Any]:
    """Returns the conversation as one sequence, padded with -1, and no rest."""
    sample = conversation[:SEQUENCE_LENGTH]
    padding = (0, SEQUENCE_LENGTH + 1 - len(sample))
    return [numpy.pad(sample, padding, constant_values=-1)], rest
