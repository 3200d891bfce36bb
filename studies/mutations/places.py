"""Places of the code that can be changed by one operator, constant or branch, and their drawing.

The operators are the usual ones of mutation testing (DeMillo, Lipton and Sayward, "Hints on Test
Data Selection", 1978): a comparison, an arithmetic or boolean operator is exchanged, a number
moved, a truth value turned round, a condition negated, a returned value withheld.
"""

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOMS = ("analysis", "training", "techniques", "predictor", "study", "storage")

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
}


@dataclass(frozen=True)
class Place:
    """An expression of a file, and what stands there instead; columns are of the UTF-8 bytes."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    kind: str
    before: str
    after: str

    @property
    def room(self) -> str:
        return Path(self.file).parts[1]

    @property
    def begin(self) -> tuple[int, int]:
        return self.line, self.column

    @property
    def end(self) -> tuple[int, int]:
        return self.end_line, self.end_column

    def text(self, source: bytes) -> str:
        """Returns what stands at this place."""
        lines = source.splitlines(keepends=True)[self.line - 1 : self.end_line]
        lines[-1] = lines[-1][: self.end_column]
        lines[0] = lines[0][self.column :]
        return b"".join(lines).decode()

    def replaced(self, source: bytes, text: str) -> bytes:
        """Returns the source of the file with `text` at this place."""
        lines = source.splitlines(keepends=True)
        head = b"".join(lines[: self.line - 1]) + lines[self.line - 1][: self.column]
        tail = lines[self.end_line - 1][self.end_column :] + b"".join(lines[self.end_line :])
        return head + text.encode() + tail

    def found_in(self, source: bytes, *, as_in: bytes) -> "Place | None":
        """Returns the place of the same lines in another source; None where they are not there.

        Of several alike it is the one with as many before it.
        """
        lines, drawn_lines = source.splitlines(), as_in.splitlines()
        count = self.end_line - self.line + 1
        wanted = drawn_lines[self.line - 1 : self.end_line]
        alike = [n for n in range(len(lines)) if lines[n : n + count] == wanted]
        before = sum(drawn_lines[n : n + count] == wanted for n in range(self.line - 1))
        if before >= len(alike):
            return None
        first = alike[before] + 1
        return replace(self, line=first, end_line=first + count - 1)


def draw(root: Path, *, seed: int, count: int) -> list[Place]:
    """Draw `count` of the places of all rooms, each with the same chance."""
    places = [
        place
        for room in ROOMS
        for file in sorted((root / "autotune" / room).rglob("*.py"))
        for place in places_of(file, root)
    ]
    return random.Random(seed).sample(places, count)


def places_of(file: Path, root: Path) -> list[Place]:
    """Returns every place of a file that can be changed, in the order of the syntax tree."""
    tree = ast.parse(file.read_bytes())
    name = str(file.relative_to(root))
    return [
        Place(
            file=name,
            line=node.lineno,
            column=node.col_offset,
            end_line=node.end_lineno or node.lineno,
            end_column=node.end_col_offset or 0,
            kind=kind,
            before=ast.unparse(node),
            after=after,
        )
        for node, kind, after in _changes(tree)
    ]


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr, str, str]]:
    """Yield the expressions below a node that can be changed: kind of change, text after it."""
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.If(test=condition) | ast.comprehension(ifs=[condition, *_]):
            yield condition, "condition", f"(not ({ast.unparse(condition)}))"
    for child in _children(node):
        if isinstance(child, ast.expr):
            for kind, after in _changed(child):
                yield child, kind, f"({after})"
        yield from _changes(child)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is below a node, without annotations, text in braces, patterns and messages."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_params") or isinstance(node, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.pattern):
                yield child


def _changed(node: ast.expr) -> Iterator[tuple[str, str]]:
    """Yield the changes of one expression."""
    match node:
        case ast.Compare(ops=[first, *_]) if type(first) in _COMPARISONS:
            other = ast.Compare(
                node.left, [_COMPARISONS[type(first)](), *node.ops[1:]], node.comparators
            )
            yield "comparison", ast.unparse(other)
        case ast.BinOp() if type(node.op) in _ARITHMETIC and not _is_text(node):
            yield (
                "arithmetic",
                ast.unparse(ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)),
            )
        case ast.BoolOp():
            other_operator = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "boolean", ast.unparse(ast.BoolOp(other_operator, node.values))
        case ast.UnaryOp(op=ast.Not()):
            yield "negation", ast.unparse(node.operand)
        case ast.UnaryOp(op=ast.USub()):
            yield "sign", ast.unparse(node.operand)
        case ast.IfExp():
            yield "branch", ast.unparse(ast.IfExp(node.test, node.orelse, node.body))
        case ast.Constant(value=bool()):
            yield "truth", repr(not node.value)
        case ast.Constant(value=int() | float()):
            yield "number", repr(node.value + 1)


def _is_text(node: ast.BinOp) -> bool:
    """Returns whether an operand is a text or a list, or the whole a union of types."""
    texts = (ast.JoinedStr, ast.List, ast.Tuple, ast.Set, ast.Dict)
    return any(
        isinstance(side, texts) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in (node.left, node.right)
    )
