"""From a study's token files to batches: memory-mapped, and in an order that all its trials share.

Imported only in a trial's own process, for it needs torch.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from autotune.data.token_file import IGNORED_LABEL, NO_TOKEN, TextFacts, Tokens, read_token_of
from autotune.spec.workload_settings import Packing


class Batch(NamedTuple):
    """Sequences to train on, int64 [sequences, length] each; a label is the token that follows, or -100."""

    tokens: Tensor
    labels: Tensor

    def valid_labels(self) -> int:
        """How many token losses there are."""
        return int((self.labels != IGNORED_LABEL).sum().item())


class TokenSequences:
    """One part of a study's text: `train.npy` or `held_out.npy`, memory-mapped."""

    def __init__(self, file: Path, *, packing: Packing, sequence_length: int) -> None:
        self._tokens: Tokens = numpy.load(file, mmap_mode="r")
        self._is_packed = packing == "packed"
        self._sequence_length = sequence_length
        self._pad_token = TextFacts.read(file.parent).pad_token

    def __len__(self) -> int:
        return (
            sequences_in(self._tokens, sequence_length=self._sequence_length)
            if self._is_packed
            else len(self._tokens)
        )

    def batch(self, indices: Iterable[int]) -> Batch:
        """The sequences at `indices`, on the host."""
        if self._is_packed:
            rows = torch.from_numpy(
                batch_of(self._tokens, indices, sequence_length=self._sequence_length)
            )
            return Batch(rows[:, :-1], rows[:, 1:])
        rows = torch.from_numpy(self._tokens[list(indices)].astype(numpy.int64))
        tokens = torch.where(rows < NO_TOKEN, read_token_of(rows), rows).masked_fill(
            rows == NO_TOKEN, self._pad_token
        )
        labels = rows.masked_fill(rows < 0, IGNORED_LABEL)
        return Batch(tokens[:, :-1], labels[:, 1:])

    def padded_batch(self, start: int, *, size: int, total: int) -> Batch:
        """`size` sequences from `start` on; rows from `total` on are there for the shape only, without labels."""
        indices = numpy.arange(start, start + size)
        beyond = indices >= total
        tokens, labels = self.batch(numpy.where(beyond, 0, indices))
        labels = labels.masked_fill(torch.from_numpy(beyond)[:, None], IGNORED_LABEL)
        return Batch(tokens.contiguous(), labels.contiguous())


def sequences_in(tokens: Tokens, *, sequence_length: int) -> int:
    return (len(tokens) - 1) // sequence_length


def batch_of(
    tokens: Tokens, indices: Iterable[int], *, sequence_length: int
) -> NDArray[numpy.int64]:
    """The sequences at `indices` with the token that follows each: int64 [batch, sequence_length + 1]."""
    starts = [index * sequence_length for index in indices]
    return numpy.stack([tokens[start : start + sequence_length + 1] for start in starts]).astype(
        numpy.int64
    )


def training_order(
    *, sequences: int, global_batch: int, seed: int
) -> Iterator[NDArray[numpy.int64]]:
    """Endless global batches of sequence indices: a fresh shuffle each epoch, an incomplete last batch dropped."""
    generator = numpy.random.default_rng(seed)
    while True:
        order = generator.permutation(sequences)
        for start in range(0, sequences - global_batch + 1, global_batch):
            yield order[start : start + global_batch]
