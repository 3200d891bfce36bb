"""The default text: the documentation of the Python standard library, found on every machine.

It consists of the language topics (`pydoc_data.topics`) and the module docstrings, in a fixed
order. It differs between Python versions, so a workload has the hash of the text.
"""

import ast
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

_NOT_DOCUMENTATION = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "ensurepip",
}
_BEFORE_DOCSTRING = {tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE}


def standard_library_texts() -> list[str]:
    """Returns a string per topic and per module: topics first, each group in alphabetical order."""
    return [text for _, text in sorted(topics.items())] + list(_module_docstrings())


def _module_docstrings() -> Iterator[str]:
    files: list[Path] = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = [name for name in subfolders if name not in _NOT_DOCUMENTATION]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    for file in sorted(files):
        text = _docstring(file)
        if text:
            yield text


def _docstring(file: Path) -> str | None:
    """Returns the module docstring, read without parsing the rest of the file."""
    with file.open("rb") as source:
        try:
            first = next(
                token
                for token in tokenize.tokenize(source.readline)
                if token.type not in _BEFORE_DOCSTRING
            )
        except (SyntaxError, tokenize.TokenError, UnicodeDecodeError):
            return None
    if first.type != tokenize.STRING:
        return None
    value = ast.literal_eval(first.string)
    return value if isinstance(value, str) else None
