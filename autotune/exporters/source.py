"""Text of our own modules, for exported files that need no autotune: the very code that the trials ran.

Reads the modules as text. Importing them would load torch.
"""

import ast
from collections.abc import Iterable
from functools import cache
from importlib.resources import files

STOCHASTIC_ROUNDING = (
    "MakeOptimizer",
    "_BITS_DROPPED",
    "round_to_bf16",
    "StochasticallyRounded",
    "_STEPS",
    "_widened",
    "_is_rounded",
)
"""What a file that rounds stochastically needs of `techniques.stochastic_rounding`."""
STEP_IN_BACKWARD = ("SteppedInBackward", "step_in_backward")
"""What a file that updates in the backward pass needs of `techniques.step_in_backward`."""


def excerpt(module: str, *names: str) -> str:
    """The top-level definitions `names` of `module`, such as "techniques.fp8", in the order in which they stand there.

    With their decorators and docstrings, and the text below a constant that says what it is.
    """
    found = _definitions(module)
    assert not (missing := set(names) - set(found)), f"{module} does not define {missing}"
    return spaced(text for name, text in found.items() if name in names)


def spaced(texts: Iterable[str]) -> str:
    """Constants under each other, and two empty lines round everything longer."""
    joined, before = "", ""
    for text in texts:
        gap = "\n" if _is_short(before) and _is_short(text) else "\n\n\n"
        joined += (gap if before else "") + text
        before = text
    return joined


@cache
def source(module: str) -> str:
    """The whole text of `module` of this package."""
    return (
        files("autotune")
        .joinpath(*module.split(".")[:-1], f"{module.rpartition('.')[2]}.py")
        .read_text("utf-8")
    )


@cache
def _definitions(module: str) -> dict[str, str]:
    lines, body = source(module).splitlines(), ast.parse(source(module)).body
    found = {}
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if (name := _name_of(statement)) is not None:
            is_explained = isinstance(statement, ast.Assign | ast.AnnAssign) and _is_text(following)
            last = following if is_explained and following is not None else statement
            found[name] = "\n".join(lines[_first_line(statement) - 1 : last.end_lineno])
    return found


def _name_of(statement: ast.stmt) -> str | None:
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return None


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def _is_text(statement: ast.stmt | None) -> bool:
    match statement:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


def _is_short(text: str) -> bool:
    return not any(line.startswith(("def ", "class ", "@", "# --")) for line in text.splitlines())
