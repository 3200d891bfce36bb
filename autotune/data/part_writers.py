"""Write the training or held-out part of a text: as one stream of tokens, or as rows.

A writer also counts the bytes and labels of the text that will be evaluated, to convert losses per
token to bits per byte.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy

from autotune.data.token_file import TokenFile
from autotune.data.tokenizer import Tokenizer
from autotune.shipped.token_encoding import NO_TOKEN, Tokens
from autotune.spec.workload import Workload


class PartWriter(ABC):
    """Writes the tokens of one text after another; `tokenizer` is None for tokenized datasets."""

    unit: str
    """Unit of `length`, for messages."""

    def __init__(self, file: TokenFile, workload: Workload, tokenizer: Tokenizer | None) -> None:
        self._file, self._tokenizer = file, tokenizer
        self._sequence_length = workload.sequence_length
        self._evaluated = self.length_of(workload.evaluation_sequences)
        self._bytes = self._labels = 0.0
        self.without_labels = 0
        """Samples, or packed sequences, that were left out because they have no label."""
        self.limit: int | None = None
        """Length at which the part is full; None: never."""

    @abstractmethod
    def length_of(self, sequences: int) -> int:
        """Returns the length that this many sequences need."""

    @abstractmethod
    def add(self, tokens: Tokens, size_bytes: int | None) -> None:
        """Append the tokens of a text of `size_bytes` (None: unknown) unless the part is full."""

    @property
    def length(self) -> int:
        """Length written so far, in `unit`."""
        return self._file.length

    @property
    def tokens_per_place(self) -> float:
        """Tokens of a sequence per place for one, which is 1 without padding."""
        return 1.0

    @property
    def is_full(self) -> bool:
        return self.limit is not None and self.length >= self.limit

    @property
    def bytes_per_token(self) -> float:
        """Bytes per label of the texts that are evaluated."""
        return self._bytes / max(1, self._labels)

    def close(self) -> bytes:
        """Finish the file and return the SHA-256 of its tokens."""
        return self._file.close()


class PackedWriter(PartWriter):
    """Writes one stream of tokens, with the tokenizer's separator between texts."""

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
    """Writes one sample per row.

    A row has one more column, for the label of its last token, which is never known.
    """

    unit = "samples"
    _tokens = 0
    """Written so far, without padding."""

    def length_of(self, sequences: int) -> int:
        return sequences

    @property
    def tokens_per_place(self) -> float:
        return self._tokens / max(1, self.length * self._sequence_length)

    def add(self, tokens: Tokens, size_bytes: int | None) -> None:
        sample = tokens
        if self._tokenizer is not None:
            sample = numpy.concatenate([self._tokenizer.beginning, tokens])
        sample = sample.astype(numpy.int32)[: self._sequence_length]
        labels = int((sample[1:] >= 0).sum())
        if self.is_full:
            return
        if not labels:
            self.without_labels += 1
            return
        if self.length < self._evaluated and size_bytes is not None:
            # Without a beginning token, the first token is not a label: its share of the bytes does
            # not count.
            self._bytes += size_bytes * labels / len(tokens)
            self._labels += labels
        row = numpy.full((1, self._sequence_length + 1), NO_TOKEN, dtype=numpy.int32)
        row[0, : len(sample)] = sample
        self._tokens += len(sample)
        self._file.append(row)


class PackedRowsWriter(PartWriter):
    """Writes sequences that are cut from one stream of samples with answers, one per row.

    Rows overlap by one token, which is the last label of one and the first input of the next. A
    sequence without an answer is left out: a batch of them would have no loss.
    """

    unit = "sequences"

    def __init__(self, file: TokenFile, workload: Workload, tokenizer: Tokenizer | None) -> None:
        super().__init__(file, workload, tokenizer)
        self._rest: Tokens = numpy.zeros(0, dtype=numpy.int32)

    def length_of(self, sequences: int) -> int:
        return sequences

    def add(self, tokens: Tokens, size_bytes: int | None) -> None:
        stream = numpy.concatenate([self._rest, tokens.astype(numpy.int32)])
        start = 0
        while len(stream) - start > self._sequence_length and not self.is_full:
            row = stream[start : start + self._sequence_length + 1]
            start += self._sequence_length
            if (row[1:] >= 0).any():
                self._file.append(row[None])
            else:
                self.without_labels += 1
        self._rest = stream[start:]


def part_writer(
    file: Path,
    workload: Workload,
    *,
    dtype: Any,
    tokenizer: Tokenizer | None,
    has_answers: bool,
    most_sequences: int | None,
) -> PartWriter:
    """Returns the writer for the workload's packing; a stream of packed tokens has `dtype`."""
    writer: PartWriter
    if workload.packing == "packed" and not has_answers:
        writer = PackedWriter(TokenFile(file, dtype=dtype), workload, tokenizer)
    else:
        rows = TokenFile(
            file, dtype=numpy.dtype(numpy.int32), row_length=workload.sequence_length + 1
        )
        kind = PackedRowsWriter if workload.packing == "packed" else PaddedWriter
        writer = kind(rows, workload, tokenizer)
    writer.limit = None if most_sequences is None else writer.length_of(most_sequences)
    return writer
