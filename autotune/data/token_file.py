"""The files of a prepared text: two arrays of tokens that are written piece by piece, and what is known of them.

Packed text is one stream of tokens in one dimension, in the smallest type without a sign that holds
the vocabulary. Padded text is int32 [samples, sequence_length + 1]: a token to train on,
`NO_TOKEN`, or a token that is only read.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

Tokens = NDArray[numpy.integer]

NO_TOKEN = -1
"""Padding: read as the pad token, no label."""
IGNORED_LABEL = -100
"""The label that torch's cross entropy leaves out, and transformers' mark of what is not to be
learned."""
FACTS_FILE = "text.json"


def read_token_of(encoded: Any) -> Any:
    """The token that stands in padded text without being a label; the same function encodes and decodes it."""
    return NO_TOKEN - 1 - encoded


@dataclass(frozen=True, kw_only=True)
class TextFacts:
    """What the arrays do not say of themselves."""

    bytes_per_token: float | None = 1.0
    """UTF-8 bytes of the held-out text a label, None where the text is not known; by default that
    of bytes."""
    pad_token: int = 0

    def write(self, folder: Path) -> None:
        (folder / FACTS_FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> "TextFacts":
        """The facts in a prepared folder; folders from before there was anything but bytes hold none."""
        file = folder / FACTS_FILE
        return cls(**json.loads(file.read_text())) if file.exists() else cls()


class TokenFile:
    """A .npy file whose first dimension grows: `append` as often as there is something, then `close`."""

    def __init__(
        self, file: Path, *, dtype: numpy.dtype[Any], row_length: int | None = None
    ) -> None:
        """One dimension, or with `row_length` a row an appended row."""
        self._dtype = dtype
        self._row_shape = () if row_length is None else (row_length,)
        self._hash = hashlib.sha256()
        self._stream = file.open("w+b")
        self.length = 0
        self._write_header()

    def append(self, tokens: Tokens) -> None:
        """Adds tokens [any], or rows [any, row_length]."""
        content = numpy.ascontiguousarray(tokens, dtype=self._dtype).tobytes()
        self._hash.update(content)
        self._stream.write(content)
        self.length += len(tokens)

    def close(self) -> bytes:
        """Finishes the file; returns the SHA-256 of its content, the header left out."""
        self._stream.seek(0)
        self._write_header()
        self._stream.close()
        return self._hash.digest()

    def _write_header(self) -> None:
        """numpy leaves room in it, so that it can be written again once the length is known."""
        header = {
            "descr": numpy.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self.length, *self._row_shape),
        }
        numpy.lib.format.write_array_header_1_0(self._stream, header)
