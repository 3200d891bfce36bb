"""How one part of a text is written: as one stream of tokens, or as padded samples.

A writer also counts the bytes and labels of what will be evaluated, so that losses a token become
bits a byte.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy

from autotune.data.token_file import NO_TOKEN, TokenFile, Tokens
from autotune.data.tokenizer import Tokenizer
from autotune.spec.workload import Workload


class PartWriter(ABC):
    """Takes the tokens of one text after the other. `tokenizer` is None for what came as tokens."""

    unit: str
    """What `length` counts."""

    def __init__(self, file: TokenFile, workload: Workload, tokenizer: Tokenizer | None) -> None:
        self._file, self._tokenizer = file, tokenizer
        self._sequence_length = workload.sequence_length
        self._evaluated = self.length_of(workload.evaluation_sequences)
        self._bytes = self._labels = 0.0
        self.limit: int | None = None
        """Length at which no more is taken."""

    @abstractmethod
    def length_of(self, sequences: int) -> int:
        """The length it takes to have that many sequences."""

    @abstractmethod
    def add(self, tokens: Tokens, size_bytes: int | None) -> None:
        """Adds the tokens of one text of `size_bytes` bytes, None where they are not known, unless it is full."""

    @property
    def length(self) -> int:
        return self._file.length

    @property
    def is_full(self) -> bool:
        return self.limit is not None and self.length >= self.limit

    @property
    def bytes_per_token(self) -> float:
        """Bytes a label, of the texts that are evaluated."""
        return self._bytes / max(1, self._labels)

    def close(self) -> bytes:
        """Finishes the file; returns the SHA-256 of its tokens."""
        return self._file.close()


class PackedWriter(PartWriter):
    """One stream, with the tokenizer's separator between texts."""

    unit = "tokens"

    def length_of(self, sequences: int) -> int:
        return sequences * self._sequence_length + 1

    def add(self, tokens: Tokens, size_bytes: int | None) -> None:
        if self.is_full or not len(tokens):
            return
        before, separator_bytes = self.length, 0
        if before and self._tokenizer is not None:
            self._file.append(self._tokenizer.separator)
            separator_bytes = self._tokenizer.separator_bytes
        self._file.append(tokens)
        if before < self._evaluated and size_bytes is not None:
            self._bytes += size_bytes + separator_bytes
            self._labels += self.length - before


class PaddedWriter(PartWriter):
    """A sample a row, with a column more for the label of its last token, which is never known."""

    unit = "samples"

    def length_of(self, sequences: int) -> int:
        return sequences

    def add(self, tokens: Tokens, size_bytes: int | None) -> None:
        sample = (
            tokens
            if self._tokenizer is None
            else numpy.concatenate([self._tokenizer.beginning, tokens])
        )
        sample = sample.astype(numpy.int32)[: self._sequence_length]
        labels = int((sample[1:] >= 0).sum())
        if self.is_full or not labels:  # without a label it teaches nothing
            return
        if self.length < self._evaluated and size_bytes is not None:
            # Where nothing stands before it, the first token is no label: its share of the bytes
            # does not count.
            self._bytes += size_bytes * labels / len(tokens)
            self._labels += labels
        row = numpy.full((1, self._sequence_length + 1), NO_TOKEN, dtype=numpy.int32)
        row[0, : len(sample)] = sample
        self._file.append(row)


def part_writer(
    file: Path,
    workload: Workload,
    *,
    dtype: Any,
    tokenizer: Tokenizer | None,
    most_sequences: int | None,
) -> PartWriter:
    """The writer the workload's packing asks for; packed tokens are of `dtype`."""
    writer: PartWriter
    if workload.packing == "packed":
        writer = PackedWriter(TokenFile(file, dtype=dtype), workload, tokenizer)
    else:
        rows = TokenFile(
            file, dtype=numpy.dtype(numpy.int32), row_length=workload.sequence_length + 1
        )
        writer = PaddedWriter(rows, workload, tokenizer)
    writer.limit = None if most_sequences is None else writer.length_of(most_sequences)
    return writer
