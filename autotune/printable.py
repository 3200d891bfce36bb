"""Text from outside as text that is safe to show: every invisible character becomes an escape.

Names of studies and trials, paths, messages of exceptions and answers of servers may hold anything.
A terminal obeys some characters: ESC moves the cursor, colours text or writes the clipboard, and
the C1 control characters do the same in one character. Others change what a reader sees: those for
the direction of text (U+202E) reorder a line, and invisible ones make two names look alike.
"""

import unicodedata
from collections.abc import Mapping
from typing import Any

_LINES = "\n\t"
_JOINERS = "\u200c\u200d"
"""They are part of emoji such as families, and of words in Persian and the scripts of India."""


def printable(text: str, *, keep_lines: bool = False) -> str:
    r"""Returns `text` with an escape, such as `\x1b`, for each character that cannot be seen.

    These are control, format and private characters, surrogates, the separators of lines and
    paragraphs, and what Unicode does not define. Letters, signs and spaces of any script stay.
    A joiner stays between two characters beyond ASCII, where emoji and some scripts need it.
    Line feeds and tabs become `\n` and `\t` unless `keep_lines` is set. A backslash stays as it is,
    so that paths stay readable: the text cannot always be turned back.
    """
    if text.isprintable():
        return text
    kept = _LINES if keep_lines else ""
    if keep_lines:
        text = text.replace("\r\n", "\n")
    return "".join(
        character
        if character.isprintable() or character in kept or _is_visible(text, place)
        else ascii(character)[1:-1]
        for place, character in enumerate(text)
    )


def _is_visible(text: str, place: int) -> bool:
    """Returns whether an unprintable character is a space, or a joiner where it joins."""
    character = text[place]
    if unicodedata.category(character) == "Zs":
        return True
    if character not in _JOINERS or not 0 < place < len(text) - 1:
        return False
    before, after = text[place - 1], text[place + 1]
    return all(each.isprintable() and not each.isascii() for each in (before, after))


def printable_values(value: Any) -> Any:
    """Returns a value made of dictionaries, lists and tuples with all of its texts printable."""
    if isinstance(value, str):
        return printable(value, keep_lines=True)
    if isinstance(value, Mapping):
        return {printable_values(key): printable_values(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(printable_values, value))
    return value
