"""Pieces of an exported script: text and the imports that it needs.

Much of the text is the source of autotune: what a technique does is written once, in
`autotune/techniques/`, and an exported script contains those definitions, so that it does the same
as the trials.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from autotune.exporters.source import excerpt, spaced


@dataclass(frozen=True)
class Piece:
    """Text of top-level statements and the import statements that it needs."""

    text: str
    imports: frozenset[str] = frozenset()


def piece(text: str, *imports: str) -> Piece:
    return Piece(text.strip("\n"), frozenset(imports))


def quoted_source(module: str, *names: str, imports: Iterable[str] = ()) -> Piece:
    """Return the definitions of `names` in `module` of this package, such as "techniques.fp8"."""
    return Piece(excerpt(module, *names), frozenset(imports))


def banner(title: str) -> Piece:
    """Return a comment line with the title of a section."""
    return Piece(f"# -- {title} ".ljust(100, "-"))


def join_pieces(pieces: Iterable[Piece]) -> str:
    """Return the text of all pieces below their imports."""
    pieces = list(pieces)
    statements: set[str] = set()
    for part in pieces:
        statements |= part.imports
    imports = _merged(statements)
    standard = [statement for statement in imports if not _is_third_party(statement)]
    others = [statement for statement in imports if _is_third_party(statement)]
    blocks = ["\n".join(lines) for lines in (standard, others) if lines]
    blocks.append(spaced(part.text for part in pieces if part.text))
    return "\n\n".join(blocks) + "\n"


def _merged(statements: Iterable[str]) -> list[str]:
    """Return the imports in the usual order, with one statement per module."""
    plain: list[str] = []
    names: dict[str, set[str]] = defaultdict(set)
    for statement in statements:
        if statement.startswith("import "):
            plain.append(statement)
            continue
        module, _, imported = statement.removeprefix("from ").partition(" import ")
        names[module] |= set(imported.split(", "))
    merged = [
        f"from {module} import {', '.join(sorted(imported))}" for module, imported in names.items()
    ]
    return [*sorted(plain), *sorted(merged)]


_THIRD_PARTY = (
    "bitsandbytes",
    "datasets",
    "huggingface_hub",
    "numpy",
    "peft",
    "tokenizers",
    "torch",
    "torchao",
    "transformers",
)


def _is_third_party(statement: str) -> bool:
    return statement.split()[1].partition(".")[0] in _THIRD_PARTY
