"""Read files that users name: only regular files, and no more of them than a stated size.

A pipe or a device could be read for ever, and a file of any size would fill the memory. TOML has a
further bound: the reader of the standard library takes a time that grows with the square of the
parts of a dotted key. What is wrong is one sentence, an InvalidInput or the given kind of it.
"""

import json
import os
import re
import stat
import tomllib
from io import BufferedReader
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput
from autotune.units import format_size

LARGEST_TEXT_BYTES = 2**20
"""Of a search space, a config.json, a file of defaults and other files that a person writes."""
LARGEST_PYTHON_BYTES = 16 * 2**20
LARGEST_TOKENIZER_BYTES = 128 * 2**20
"""Four times the tokenizer.json with a vocabulary of 262,144 tokens."""

MOST_KEY_PARTS = 32
"""Of a dotted TOML key; that of a search space has at most four."""

_KEY_PART = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
# Only from the beginning of a word on, and without backtracking, so that the time grows with the
# size of the text. It also looks into strings: a text of so many words joined by dots is a key too.
_LONG_KEY = re.compile(
    rf"(?<![A-Za-z0-9_\\-]){_KEY_PART}(?:[ \t]*+\.[ \t]*+{_KEY_PART}){{{MOST_KEY_PARTS},}}+"
)

_KEY_OF_CONSTANT = re.compile(r'"([^"\n]{1,80})"\s*+:\s*+\[?\s*+(?:NaN|-?Infinity)')
"""The key of the first value that Python's reader takes for a number and JSON does not have."""

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_file(file: Path) -> BufferedReader:
    """Open a regular file to read its bytes. Raises OSError, also for what is not a regular file.

    A pipe and a device are not even opened: that could wait for ever, or do something.
    """
    try:
        _check_regular(os.stat(file).st_mode)
        # Without waiting, where a pipe has taken the file's place in between.
        opened = os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except ValueError:  # a null byte, or characters that no name on this system has
        raise OSError(0, "no file has such a name") from None
    try:
        _check_regular(os.fstat(opened.fileno()).st_mode)
    except OSError:
        opened.close()
        raise
    return opened


def _check_regular(mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    what = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
    raise OSError(0, f"it is {what}, not a regular file")


def read_file(
    file: Path,
    *,
    most_bytes: int = LARGEST_TEXT_BYTES,
    hint: str = "",
    kind: type[InvalidInput] = InvalidInput,
) -> bytes:
    """Returns the content of a regular file. Raises `kind`, also where it has more bytes."""
    try:
        with open_file(file) as opened:
            # Not by its size alone: that of a file of the kernel is 0.
            content = opened.read(most_bytes + 1)
    except OSError as error:
        raise kind(
            f"{file} cannot be read: {error.strerror or error}",
            hint=hint or "name a regular file; what comes from a pipe has to be saved as one",
        ) from None
    if len(content) > most_bytes:
        raise kind(
            f"{file} is too large: it has more than {format_size(most_bytes)}",
            hint=hint or "check that this is the file that you mean",
        )
    return content


def read_toml(
    file: Path, *, hint: str = "", kind: type[InvalidInput] = InvalidInput
) -> dict[str, Any]:
    """Returns the content of a TOML file of at most 1 MiB. Raises `kind`."""
    return parse_toml(read_file(file, hint=hint, kind=kind), source=str(file), hint=hint, kind=kind)


def parse_toml(
    content: bytes, *, source: str, hint: str = "", kind: type[InvalidInput] = InvalidInput
) -> dict[str, Any]:
    """Returns the tables of TOML in UTF-8, which may begin with a byte order mark. Raises `kind`.

    `source` is how messages name the text.
    """
    text = _text(content, source=source, language="TOML", hint=hint, kind=kind)
    long_key = _LONG_KEY.search(text)
    if long_key is not None:
        line = text.count("\n", 0, long_key.start()) + 1
        raise kind(
            f"{source} is not valid TOML here: a key of more than {MOST_KEY_PARTS} parts "
            f"(at line {line})",
            hint=hint or "correct this line",
        )
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # ValueError also for numbers of thousands of digits, RecursionError for deep nesting.
        raise kind(
            f"{source} is not valid TOML: {_reason(error)}", hint=hint or "correct this line"
        ) from None


def read_json(file: Path, *, most_bytes: int = LARGEST_TEXT_BYTES, hint: str = "") -> Any:
    """Returns the value in a JSON file. Raises InvalidInput."""
    return parse_json(
        read_file(file, most_bytes=most_bytes, hint=hint), source=str(file), hint=hint
    )


def parse_json(content: bytes, *, source: str, hint: str = "") -> Any:
    """Returns the value of JSON in UTF-8, which may begin with a byte order mark.

    Raises InvalidInput, also for Infinity and NaN, which are not JSON.
    """
    text = _text(content, source=source, language="JSON", hint=hint, kind=InvalidInput)
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        key = _KEY_OF_CONSTANT.search(text)
        where = f", as {key[1]} is" if key and "is not a JSON number" in str(error) else ""
        raise InvalidInput(
            f"{source} is not valid JSON: {_reason(error)}{where}",
            hint=hint or "correct the file at this position",
        ) from None


def _text(
    content: bytes, *, source: str, language: str, hint: str, kind: type[InvalidInput]
) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise kind(
            f"{source} is not valid {language}: it is not UTF-8 text ({error.reason})",
            hint=hint or "save it as UTF-8",
        ) from None


def _reason(error: ValueError | RecursionError) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")
