"""The tokenizer of a script that trains it."""

from collections.abc import Iterable
from pathlib import Path

from autotune.shipped.bpe import train_bpe
from autotune.shipped.script.written import (
    GLOBAL_BATCH,
    SEQUENCE_LENGTH,
    STEPS,
    STREAMING,
    VOCABULARY,
    units_of,
)
from autotune.shipped.subword_tokenizer import SubwordTokenizer
from autotune.shipped.text_parts import HELD_OUT, TRAIN, TRAINED_ON_BYTES_PER_TOKEN, up_to


def make_tokenizer(text: str) -> SubwordTokenizer:
    """Trains a tokenizer on the training part and stores it in tokenizer.json next to this file."""
    units = units_of(text, lambda part: part == HELD_OUT)
    texts: Iterable[bytes] = (unit for part, unit in units if part == TRAIN)
    if STREAMING:
        texts = up_to(TRAINED_ON_BYTES_PER_TOKEN * STEPS * GLOBAL_BATCH * SEQUENCE_LENGTH, texts)
    file = Path(__file__).with_name("tokenizer.json")
    return train_bpe(texts, vocab_size=VOCABULARY, file=file)
