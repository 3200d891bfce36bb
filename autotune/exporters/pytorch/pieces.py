"""A script is put together of pieces: some text and what it imports.

Much of the text is autotune's own source.

What a technique does is written once, in `autotune/techniques/`: an exported script carries those
very definitions, so that it cannot drift from the trials.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from autotune.exporters.source import excerpt, spaced


@dataclass(frozen=True)
class Piece:
    """`text` of top-level statements, and the import statements that it needs."""

    text: str
    imports: frozenset[str] = frozenset()


def piece(text: str, *imports: str) -> Piece:
    return Piece(text.strip("\n"), frozenset(imports))


def own_source(module: str, *names: str, imports: Iterable[str] = ()) -> Piece:
    """The definitions of `names` in `module` of this package, such as "techniques.fp8"."""
    return Piece(excerpt(module, *names), frozenset(imports))


def banner(title: str) -> Piece:
    """A line that says what follows."""
    return Piece(f"# -- {title} ".ljust(119, "-"))


def together(pieces: Iterable[Piece]) -> str:
    """The pieces as one text below the imports of all of them."""
    kept = list(pieces)
    imports = _merged({statement for one in kept for statement in one.imports})
    standard = [statement for statement in imports if not _is_third_party(statement)]
    others = [statement for statement in imports if _is_third_party(statement)]
    blocks = ["\n".join(lines) for lines in (standard, others) if lines]
    return "\n\n".join(blocks) + "\n\n" + spaced(one.text for one in kept if one.text) + "\n"


def _merged(statements: Iterable[str]) -> list[str]:
    """In the usual order, and what comes from one module in one statement."""
    plain: list[str] = []
    names: dict[str, set[str]] = defaultdict(set)
    for statement in statements:
        if statement.startswith("import "):
            plain.append(statement)
            continue
        module, _, said = statement.removeprefix("from ").partition(" import ")
        names[module] |= set(said.split(", "))
    merged = [f"from {module} import {', '.join(sorted(said))}" for module, said in names.items()]
    return [*sorted(plain), *sorted(merged)]


_THIRD_PARTY = (
    "datasets",
    "huggingface_hub",
    "numpy",
    "tokenizers",
    "torch",
    "torchao",
    "transformers",
)


def _is_third_party(statement: str) -> bool:
    return statement.split()[1].partition(".")[0] in _THIRD_PARTY
