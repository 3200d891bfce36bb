"""A tokenizer of the `tokenizers` library."""

from collections.abc import Sequence
from typing import Any

import numpy

from autotune.shipped.token_encoding import Tokens

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"
_NAMES = {
    "bos": ("<|begin_of_text|>", "<s>", "<bos>", END_OF_TEXT),
    "eos": (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>"),
    "pad": (PADDING, "<pad>", "[PAD]", "<|finetune_right_pad_id|>"),
}
"""Usual names of the token of each role, used without a tokenizer_config.json."""


class SubwordTokenizer:
    """A tokenizer of the `tokenizers` library."""

    separator_bytes = 0

    def __init__(self, tokenizer: Any, *, settings: dict[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        roles = {role: _token_of(role, tokenizer, settings or {}) for role in _NAMES}
        self.beginning = _array([] if roles["bos"] is None else [roles["bos"]])
        added = tokenizer.encode("", add_special_tokens=True).ids[:1]
        self.own_beginning = _array(added if added == [roles["bos"]] else [])
        self.separator = _array([] if roles["eos"] is None else [roles["eos"]])
        self.pad_token = roles["pad"] or 0

    def encode(self, texts: Sequence[bytes], *, longest: int | None) -> list[tuple[Tokens, int]]:
        # numpy arrays, because lists of Python integers take ten times the memory of the text.
        decoded = [text.decode() for text in texts]
        encodings = self._tokenizer.encode_batch(decoded, add_special_tokens=False)
        return [
            (_array(encoding.ids[:longest]), _bytes_of(text, encoding, longest))
            for text, encoding in zip(decoded, encodings, strict=True)
        ]

    def encode_with_offsets(self, text: str) -> tuple[Tokens, list[tuple[int, int]]]:
        """Returns the tokens of a text, and from which to which character each goes."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return _array(encoding.ids), encoding.offsets


def _bytes_of(text: str, encoding: Any, longest: int | None) -> int:
    """Returns how many bytes of `text` its first `longest` tokens represent."""
    if longest is None or len(encoding.ids) <= longest:
        return len(text.encode())
    end = encoding.offsets[longest - 1][1] if longest else 0
    return len(text[:end].encode())


def _array(tokens: list[int]) -> Tokens:
    return numpy.array(tokens, dtype=numpy.uint32)


def _token_of(role: str, tokenizer: Any, settings: dict[str, Any]) -> int | None:
    """Returns the token of a role, by its name in `settings` or else by its usual names."""
    names: list[Any] = list(_NAMES[role])
    if f"{role}_token" in settings:
        setting = settings[f"{role}_token"]
        names = [setting.get("content") if isinstance(setting, dict) else setting]
    for name in names:
        token: int | None = tokenizer.token_to_id(name) if isinstance(name, str) else None
        if token is not None:
            return token
    return None
