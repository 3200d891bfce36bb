"""From documents to two token streams on disk, and from the streams to batches.

Long documents are cut into passages; a passage belongs to the held-out part when its hash says so, whatever its
place in the text. Each part is one packed stream of byte-level tokens, kept as a .npy file and memory-mapped.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy
from numpy.typing import NDArray

from autotune.errors import InvalidDataset
from autotune.workload import Workload

PASSAGE_CHARACTERS = 4096
HELD_OUT_ONE_IN = 10
SEPARATOR = b"\n\n"

Tokens = NDArray[numpy.integer]


def passages(documents: Iterable[str]) -> Iterator[bytes]:
    """Each document as UTF-8, in passages of at most 4,096 characters."""
    for document in documents:
        for start in range(0, len(document), PASSAGE_CHARACTERS):
            yield document[start : start + PASSAGE_CHARACTERS].encode("utf-8", errors="replace")


def is_held_out(passage: bytes) -> bool:
    return int.from_bytes(hashlib.sha256(passage).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def write_tokens(documents: Iterable[str], workload: Workload, *, folder: Path) -> str:
    """Writes `train.npy` and `held_out.npy` (uint8, one dimension) and returns their SHA-256.

    Raises InvalidDataset when either part is too short for the workload.
    """
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for passage in passages(documents):
        parts[is_held_out(passage)].append(passage)
    train, held_out = (SEPARATOR.join(parts[part]) for part in (False, True))
    _check_length(train, held_out, workload)
    numpy.save(folder / "train.npy", numpy.frombuffer(train, dtype=numpy.uint8))
    numpy.save(folder / "held_out.npy", numpy.frombuffer(held_out, dtype=numpy.uint8))
    return hashlib.sha256(hashlib.sha256(train).digest() + hashlib.sha256(held_out).digest()).hexdigest()


def _check_length(train: bytes, held_out: bytes, workload: Workload) -> None:
    for part, text, sequences, shorter in (
        ("training", train, workload.global_batch, "--seq-len or --global-batch"),
        ("held-out", held_out, workload.evaluation_sequences, "--seq-len or --eval-sequences"),
    ):
        needed = sequences * workload.sequence_length + 1
        if len(text) < needed:
            raise InvalidDataset(
                f"the {part} part of dataset {workload.dataset!r} has {len(text)} tokens and {needed} are needed",
                hint=f"use more text, or a smaller {shorter}",
            )


def sequences_in(tokens: Tokens, *, sequence_length: int) -> int:
    return (len(tokens) - 1) // sequence_length


def batch_of(tokens: Tokens, indices: Iterable[int], *, sequence_length: int) -> NDArray[numpy.int64]:
    """The sequences at `indices` with the token that follows each: int64 [batch, sequence_length + 1]."""
    starts = [index * sequence_length for index in indices]
    return numpy.stack([tokens[start : start + sequence_length + 1] for start in starts]).astype(numpy.int64)


def training_order(*, sequences: int, global_batch: int, seed: int) -> Iterator[NDArray[numpy.int64]]:
    """Endless global batches of sequence indices: a fresh shuffle each epoch, an incomplete last batch dropped."""
    generator = numpy.random.default_rng(seed)
    while True:
        order = generator.permutation(sequences)
        for start in range(0, sequences - global_batch + 1, global_batch):
            yield order[start : start + global_batch]
