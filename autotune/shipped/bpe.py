"""A byte-level BPE, trained on a text."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from autotune.shipped.subword_tokenizer import END_OF_TEXT, PADDING, SubwordTokenizer

_LONG_WORD = re.compile(r"\w{256,}")
"""Removed before a BPE is trained: it learns nothing from such words, but stores each of them."""


def train_bpe(texts: Iterable[bytes], *, vocab_size: int, file: Path) -> SubwordTokenizer:
    """Train a byte-level BPE of at most `vocab_size` tokens and store it in `file`.

    Equal texts give equal tokenizers.
    """
    tokenizer: Any = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((_LONG_WORD.sub("", text.decode()) for text in texts), trainer)
    tokenizer.save(str(file))
    return SubwordTokenizer(tokenizer)
