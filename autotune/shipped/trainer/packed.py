"""Samples for Trainer, cut from one stream of all texts."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from autotune.shipped.labels import IGNORED_LABEL


def packed_sequences(
    texts: Iterable[str], encode: Callable[[str], Sequence[int]], length: int
) -> list[dict[str, Any]]:
    """Returns sequences of `length` tokens, cut from one stream of all texts.

    Tokens at the end of the stream that do not fill a sequence are dropped.
    """
    stream = torch.tensor([token for text in texts for token in encode(text)])
    rows = stream[: len(stream) // length * length].view(-1, length)
    # The first token is not predicted; some versions would count its label in the mean.
    return [
        {"input_ids": row, "labels": F.pad(row[1:], (1, 0), value=IGNORED_LABEL)} for row in rows
    ]
