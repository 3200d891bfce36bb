"""Write the documents of a dataset to the token files of a study, `train.npy` and `held_out.npy`.

Packed: documents are cut into passages, and each passage is a separate text in the stream. Padded:
a document is one sample, cut at the end of the sequence. A conversation is never cut before it is
tokenized. If no held-out split is specified, a hash
of the passage or document decides whether it is held out, independent of its position. Only the
pieces that are being processed are in memory.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy

from autotune.data.chat import ChatColumn
from autotune.data.columns import TokenColumn
from autotune.data.part_writers import PartWriter, part_writer
from autotune.data.prompts import PromptColumns
from autotune.data.sources import Documents, Parts
from autotune.data.token_file import TextFacts
from autotune.data.tokenizer import FILE_NAME, Tokenizer, load_tokenizer
from autotune.errors import InvalidDataset
from autotune.shipped.bpe import train_bpe
from autotune.shipped.text_parts import (
    HELD_OUT,
    TRAIN,
    TRAINED_ON_BYTES_PER_TOKEN,
    assigned,
    beginnings,
    passages,
    up_to,
)
from autotune.spec.workload import Workload

_ENCODED_AT_ONCE_BYTES = 2**20


def write_tokens(parts: Parts, workload: Workload, *, folder: Path) -> str:
    """Write `train.npy`, `held_out.npy` and `text.json`, and for a BPE `tokenizer.json`.

    Returns the SHA-256 of the tokens. Raises InvalidDataset if a part is too short for the workload
    or cannot be read, and InvalidInput for a tokenizer that cannot be used.
    """
    kind = _kind_of(parts.train)
    if parts.held_out is not None and _kind_of(parts.held_out) != kind:
        raise InvalidDataset(
            f"dataset {workload.dataset!r} has one split of {kind} and one of "
            f"{_kind_of(parts.held_out)}",
            hint="use splits of one kind, or name the column of text with --text-column",
        )
    if kind == "text":
        return _write_texts(parts, workload, folder=folder)
    return _write_samples(parts, workload, folder=folder)


def _kind_of(documents: Documents) -> str:
    if isinstance(documents, ChatColumn):
        return "conversations"
    if isinstance(documents, PromptColumns):
        return "prompts and answers"
    return "tokens" if isinstance(documents, TokenColumn) else "text"


def _write_texts(parts: Parts, workload: Workload, *, folder: Path) -> str:
    units = _units(parts, workload)
    tokenizer = _tokenizer(units, workload, folder=folder)
    dtype = numpy.min_scalar_type(tokenizer.vocab_size - 1)
    writers = _writers(workload, folder=folder, dtype=dtype, tokenizer=tokenizer)
    longest = None
    if workload.packing == "padded":
        longest = workload.sequence_length - len(tokenizer.beginning)
    for batch in _batches(units(lambda part: writers[part].is_full)):
        encoded = tokenizer.encode([text for _, text in batch], longest=longest)
        for (part, _), (tokens, size_bytes) in zip(batch, encoded, strict=True):
            writers[part].add(tokens, size_bytes)
    facts = TextFacts(
        bytes_per_token=writers[HELD_OUT].bytes_per_token,
        pad_token=tokenizer.pad_token,
        tokens_per_place=writers[TRAIN].tokens_per_place,
    )
    return _finish(writers, workload, facts, folder=folder)


def _write_samples(parts: Parts, workload: Workload, *, folder: Path) -> str:
    """Write samples that have all their tokens: of a tokenized dataset, or with answers."""
    dtype = numpy.min_scalar_type(workload.vocab_size - 1)
    answered = parts.train if isinstance(parts.train, ChatColumn | PromptColumns) else None
    writers = _writers(
        workload, folder=folder, dtype=dtype, tokenizer=None, has_answers=answered is not None
    )
    samples = assigned(parts.train, parts.held_out, is_full=lambda part: writers[part].is_full)
    for part, tokens in samples:
        if answered is None and workload.packing == "packed" and (tokens < 0).any():
            raise InvalidDataset(
                f"the labels of dataset {workload.dataset!r} ignore some tokens, "
                "but packed sequences learn every token",
                hint="use --packing padded",
            )
        writers[part].add(tokens, None)
    facts = TextFacts(
        bytes_per_token=None,
        pad_token=0 if answered is None else answered.pad_token,
        tokens_per_place=writers[TRAIN].tokens_per_place,
    )
    return _finish(writers, workload, facts, folder=folder)


# -- assignment to the two parts -------------------------------------------------------------------

Units = Callable[[Callable[[bool], bool]], Iterator[tuple[bool, bytes]]]
"""Function that takes `is_full(part)` and yields (is held out, text) for every text."""


def _units(parts: Parts, workload: Workload) -> Units:
    def cut(documents: Iterable[Any]) -> Iterator[bytes]:
        if workload.packing == "packed":
            return passages(documents)
        return beginnings(documents, sequence_length=workload.sequence_length)

    def units(is_full: Callable[[bool], bool]) -> Iterator[tuple[bool, bytes]]:
        held_out = None if parts.held_out is None else cut(parts.held_out)
        return assigned(cut(parts.train), held_out, is_full=is_full)

    return units


def _batches(units: Iterable[tuple[bool, bytes]]) -> Iterator[list[tuple[bool, bytes]]]:
    batch: list[tuple[bool, bytes]] = []
    size_bytes = 0
    for part, text in units:
        batch.append((part, text))
        size_bytes += len(text)
        if size_bytes >= _ENCODED_AT_ONCE_BYTES:
            yield batch
            batch = []
            size_bytes = 0
    yield batch


def _tokenizer(units: Units, workload: Workload, *, folder: Path) -> Tokenizer:
    if workload.tokenizer != "bpe":
        return load_tokenizer(workload)
    texts: Iterator[bytes] = (
        text for part, text in units(lambda part: part == HELD_OUT) if part == TRAIN
    )
    if workload.streaming:
        tokens = workload.steps * workload.tokens_per_step
        texts = up_to(TRAINED_ON_BYTES_PER_TOKEN * tokens, texts)
    return train_bpe(texts, vocab_size=workload.vocab_size, file=folder / FILE_NAME)


# -- the two parts on disk -------------------------------------------------------------------------

Writers = dict[bool, PartWriter]
_FILES = {TRAIN: "train.npy", HELD_OUT: "held_out.npy"}


def _writers(
    workload: Workload,
    *,
    folder: Path,
    dtype: Any,
    tokenizer: Tokenizer | None,
    has_answers: bool = False,
) -> Writers:
    used = {TRAIN: workload.steps * workload.global_batch, HELD_OUT: workload.evaluation_sequences}
    return {
        part: part_writer(
            folder / name,
            workload,
            dtype=dtype,
            tokenizer=tokenizer,
            has_answers=has_answers,
            most_sequences=used[part] if workload.streaming else None,
        )
        for part, name in _FILES.items()
    }


def _finish(writers: Writers, workload: Workload, facts: TextFacts, *, folder: Path) -> str:
    digests = [writers[part].close() for part in (TRAIN, HELD_OUT)]
    _check_length(writers, workload)
    facts.write(folder)
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _check_length(writers: Writers, workload: Workload) -> None:
    for part, name, sequences, option in (
        (TRAIN, "training", workload.global_batch, "--global-batch"),
        (HELD_OUT, "held-out", workload.evaluation_sequences, "--eval-sequences"),
    ):
        writer = writers[part]
        needed = writer.length_of(sequences)
        if writer.length < needed:
            if workload.packing == "packed":
                hint = f"use more text, or a smaller --seq-len or {option}"
            else:
                hint = (
                    f"use more documents (a text file is one), a smaller {option}, "
                    "or --packing packed"
                )
            if part == HELD_OUT and writer.unit != "tokens" and writer.length:
                hint = f"use {option} {writer.length}, or more data"
            left_out = ""
            if writer.without_labels:
                left_out = (
                    f"; {writer.without_labels} without a label in their "
                    f"{workload.sequence_length} tokens are left out"
                )
                hint = f"use a larger --seq-len, more data, or a smaller {option}"
            raise InvalidDataset(
                f"the {name} part of dataset {workload.dataset!r} has {writer.length} "
                f"{writer.unit} and {needed} are needed{left_out}",
                hint=hint,
            )
