"""Make batches from the memory-mapped token files of a study, in the same order for every trial.

Imported only in the process of a trial, because it imports torch.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from autotune.data.token_file import TextFacts
from autotune.shipped.labels import IGNORED_LABEL
from autotune.shipped.token_encoding import NO_TOKEN, Tokens, read_token_of


class Batch(NamedTuple):
    """Tokens and labels, int64 [sequences, length] each; a label is the next token, or -100."""

    tokens: Tensor
    labels: Tensor


class TokenSequences:
    """The sequences of `train.npy` or `held_out.npy`, memory-mapped."""

    def __init__(self, file: Path, *, sequence_length: int) -> None:
        self._tokens: Tokens = numpy.load(file, mmap_mode="r")
        self._is_stream = self._tokens.ndim == 1
        self._sequence_length = sequence_length
        self._pad_token = TextFacts.read(file.parent).pad_token

    def __len__(self) -> int:
        if not self._is_stream:
            return len(self._tokens)
        return sequences_in(self._tokens, sequence_length=self._sequence_length)

    def batch(self, indices: Iterable[int]) -> Batch:
        """Returns the sequences at `indices`, on the host."""
        if self._is_stream:
            packed = batch_of(self._tokens, indices, sequence_length=self._sequence_length)
            rows = torch.from_numpy(packed)
            return Batch(rows[:, :-1], rows[:, 1:])
        # In numpy, as above: the host's batches belong to none of torch's allocators, so that on a
        # CPU a step has the same peak whatever the form of the text.
        stored = self._tokens[list(indices)].astype(numpy.int64)
        tokens = numpy.where(stored < NO_TOKEN, read_token_of(stored), stored)
        tokens[stored == NO_TOKEN] = self._pad_token
        labels = numpy.where(stored < 0, IGNORED_LABEL, stored)
        return Batch(torch.from_numpy(tokens)[:, :-1], torch.from_numpy(labels)[:, 1:])

    def padded_batch(self, start: int, *, size: int, total: int) -> Batch:
        """Returns `size` sequences from `start` on; those from `total` on have no labels.

        They only fill the batch, so that all batches have the same shape.
        """
        indices = numpy.arange(start, start + size)
        beyond = indices >= total
        tokens, labels = self.batch(numpy.where(beyond, 0, indices))
        labels = labels.masked_fill(torch.from_numpy(beyond)[:, None], IGNORED_LABEL)
        return Batch(tokens.contiguous(), labels.contiguous())


def sequences_in(tokens: Tokens, *, sequence_length: int) -> int:
    """Returns the number of sequences in a packed stream; the last label needs one token more."""
    return (len(tokens) - 1) // sequence_length


def batch_of(
    tokens: Tokens, indices: Iterable[int], *, sequence_length: int
) -> NDArray[numpy.int64]:
    """Returns sequences with the token that follows each: int64 [batch, sequence_length + 1]."""
    starts = [index * sequence_length for index in indices]
    rows = [tokens[start : start + sequence_length + 1] for start in starts]
    return numpy.stack(rows).astype(numpy.int64)
