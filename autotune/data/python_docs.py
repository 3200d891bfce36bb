"""The default text: the documentation of the Python standard library, which is on every machine that runs this.

Language topics (`pydoc_data.topics`) and module docstrings, in a fixed order. It differs between
Python versions, which is why a workload carries the text's hash.
"""

import ast
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


def documents() -> list[str]:
    """One string a topic or module, topics first, each group in alphabetical order."""
    return [text for _, text in sorted(topics.items())] + list(_module_docstrings())


def _module_docstrings() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        if _NOT_DOCUMENTATION.isdisjoint(file.relative_to(root).parts) and (
            text := _docstring(file)
        ):
            yield text


def _docstring(file: Path) -> str | None:
    """The module docstring, read without parsing the rest of the file."""
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
