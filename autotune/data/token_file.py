"""The files of a prepared text: two arrays of tokens, written in pieces, and facts about them.

Packed text is a one-dimensional stream of tokens in the smallest unsigned type that fits the
vocabulary. Padded text and packed conversations are rows, int32 [samples, sequence_length + 1]. An
entry is a token to train on (zero or above), `NO_TOKEN` for padding, or a token that is input but
no label, encoded by `read_token_of` as a number below `NO_TOKEN`.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy

from autotune.shipped.token_encoding import Tokens

FACTS_FILE = "text.json"


@dataclass(frozen=True, kw_only=True)
class TextFacts:
    """Facts about a prepared text that the arrays do not contain."""

    bytes_per_token: float | None = 1.0
    """UTF-8 bytes per label of the held-out text; None if the text is unknown. The default is that
    of the bytes tokenizer."""
    pad_token: int = 0
    tokens_per_place: float = 1.0
    """Tokens of the training sequences per place for one: 1 without padding."""

    def write(self, folder: Path) -> None:
        """Write the facts to `text.json` in the prepared folder."""
        (folder / FACTS_FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> "TextFacts":
        """Returns the facts in a prepared folder.

        Folders from releases that only had the bytes tokenizer have no such file.
        """
        file = folder / FACTS_FILE
        if not file.exists():
            return cls()
        return cls(**json.loads(file.read_text()))


class TokenFile:
    """A .npy file to which rows are appended; `close` writes the final length."""

    def __init__(
        self, file: Path, *, dtype: numpy.dtype[Any], row_length: int | None = None
    ) -> None:
        """Create `file` with shape [length], or [length, row_length] with `row_length`."""
        self._dtype = dtype
        self._row_shape = () if row_length is None else (row_length,)
        self._hash = hashlib.sha256()
        self._stream = file.open("w+b")
        self.length = 0
        self._write_header()

    def append(self, tokens: Tokens) -> None:
        """Append tokens [any], or rows [any, row_length]."""
        content = numpy.ascontiguousarray(tokens, dtype=self._dtype).tobytes()
        self._hash.update(content)
        self._stream.write(content)
        self.length += len(tokens)

    def close(self) -> bytes:
        """Finish the file and return the SHA-256 of its content without the header."""
        self._stream.seek(0)
        self._write_header()
        self._stream.close()
        return self._hash.digest()

    def _write_header(self) -> None:
        """Write the header; numpy pads it, so that it can be rewritten when the length is known."""
        header = {
            "descr": numpy.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self.length, *self._row_shape),
        }
        numpy.lib.format.write_array_header_1_0(self._stream, header)
