"""Rows of tokens, some of which are not labels."""

from typing import Any

import numpy
import torch
from torch import Tensor

from autotune.shipped.labels import IGNORED_LABEL


class Sequences:
    """Rows of tokens, in batches.

    -1 is padding. A smaller value, -2 - token, stands for a token that is not a label.
    """

    def __init__(self, tokens: Any, pad_token: int) -> None:
        self.tokens = tokens
        self.pad_token = pad_token

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: Any) -> tuple[Tensor, Tensor]:
        """Returns tokens and labels, int64 [sequences, length] each.

        A label is the next token, or -100.
        """
        rows = numpy.asarray(self.tokens[list(indices)], dtype=numpy.int64)
        tokens = numpy.where(rows < -1, -2 - rows, rows)
        tokens[rows == -1] = self.pad_token
        labels = numpy.where(rows < 0, IGNORED_LABEL, rows)
        return torch.from_numpy(tokens)[:, :-1], torch.from_numpy(labels)[:, 1:]

    def tokens_per_sequence(self) -> float:
        """Returns the mean number of tokens in a sequence, without padding."""
        return float((self.tokens[:, :-1] != -1).sum() / len(self.tokens))
