"""The tokenizer of a script whose tokens are bytes."""

from autotune.shipped.byte_tokenizer import ByteTokenizer


def make_tokenizer(text: str) -> ByteTokenizer:
    return ByteTokenizer()
