"""Samples for Trainer, each the beginning of a text."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from autotune.shipped.labels import IGNORED_LABEL


def padded_sequences(
    texts: Iterable[str], encode: Callable[[str], Sequence[int]], length: int
) -> list[dict[str, Any]]:
    """Returns the first `length` tokens of each text, padded; padding has no labels."""
    rows = [torch.tensor(encode(text)[:length]) for text in texts]
    return [
        {
            "input_ids": F.pad(row, (0, length - len(row))),
            "labels": F.pad(row[1:], (1, length - len(row)), value=IGNORED_LABEL),
        }
        for row in rows
        if len(row) > 1  # a single token has no label
    ]
