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
        rows = torch.from_numpy(numpy.asarray(self.tokens[list(indices)], dtype=numpy.int64))
        tokens = torch.where(rows < -1, -2 - rows, rows).masked_fill(rows == -1, self.pad_token)
        labels = rows.masked_fill(rows < 0, IGNORED_LABEL)
        return tokens[:, :-1], labels[:, 1:]
