"""A tokenizer whose tokens are bytes."""

from collections.abc import Sequence

import numpy

from autotune.shipped.token_encoding import Tokens


class ByteTokenizer:
    """Each byte is a token; a blank line separates passages."""

    vocab_size = 256
    beginning: Tokens = numpy.zeros(0, dtype=numpy.uint8)
    own_beginning = beginning
    separator: Tokens = numpy.frombuffer(b"\n\n", dtype=numpy.uint8)
    separator_bytes = len(separator)
    pad_token = 0

    def encode(self, texts: Sequence[bytes], *, longest: int | None) -> list[tuple[Tokens, int]]:
        arrays = [numpy.frombuffer(text, dtype=numpy.uint8)[:longest] for text in texts]
        return [(array, len(array)) for array in arrays]
