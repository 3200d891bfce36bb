"""A script is put together of pieces: some text and what it imports. Much of the text is autotune's own source.

What a technique does is written once, in `autotune/techniques/`: an exported script carries those very definitions,
so that it cannot drift from the trials.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Piece:
    """`text` of top-level statements, and the import statements that it needs."""

    text: str
    imports: frozenset[str] = frozenset()


def piece(text: str, *imports: str) -> Piece:
    return Piece(text.strip("\n"), frozenset(imports))


def own_source(file: str, *names: str, imports: Iterable[str] = ()) -> Piece:
    """The definitions of `names` in `file` of this package, in their order there, comments and docstrings included."""
    found = _definitions(file)
    assert not (missing := set(names) - set(found)), f"{file} has no {missing}"
    return Piece(_spaced(text for name, text in found.items() if name in names), frozenset(imports))


def banner(title: str) -> Piece:
    """A line that says what follows."""
    return Piece(f"# -- {title} ".ljust(119, "-"))


def _spaced(texts: Iterable[str]) -> str:
    """Constants under each other, and two empty lines round everything longer."""
    spaced, before = "", ""
    for text in texts:
        gap = "\n" if _is_short(before) and _is_short(text) else "\n\n\n"
        spaced += (gap if before else "") + text
        before = text
    return spaced


def _is_short(text: str) -> bool:
    return not any(line.startswith(("def ", "class ", "@", "# --")) for line in text.splitlines())


def together(pieces: Iterable[Piece]) -> str:
    """The pieces as one text below the imports of all of them."""
    kept = list(pieces)
    imports = _merged({statement for one in kept for statement in one.imports})
    standard = [statement for statement in imports if not _is_third_party(statement)]
    others = [statement for statement in imports if _is_third_party(statement)]
    blocks = ["\n".join(lines) for lines in (standard, others) if lines]
    return "\n\n".join(blocks) + "\n\n" + _spaced(one.text for one in kept if one.text) + "\n"


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


@cache
def _definitions(file: str) -> dict[str, str]:
    """{name: source} of every function, class and constant of a module."""
    source = (files("autotune") / file).read_text(encoding="utf-8")
    lines, body = source.splitlines(), ast.parse(source).body
    found = {}
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if (name := _name_of(statement)) is None:
            continue
        last = following if _is_documentation(following) else statement
        assert last is not None
        found[name] = "\n".join(lines[_first_line(statement) - 1 : last.end_lineno])
    return found


def _name_of(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return statement.name
    target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
    return target.id if isinstance(target, ast.Name) else None


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def _is_documentation(statement: ast.stmt | None) -> bool:
    """A text below a constant, which says what it is."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


_THIRD_PARTY = ("datasets", "huggingface_hub", "numpy", "tokenizers", "torch", "torchao", "transformers")


def _is_third_party(statement: str) -> bool:
    return statement.split()[1].partition(".")[0] in _THIRD_PARTY
