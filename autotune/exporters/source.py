"""Text of our own modules, for exported files that need no autotune: the very code that the trials ran.

Reads the modules as text. Importing them would load torch.
"""

import ast
from functools import cache
from importlib.resources import files


def excerpt(module: str, *names: str) -> str:
    """The top-level definitions `names` of `module`, such as "techniques.fp8", in the order of the module."""
    text, found = source(module), []
    body = ast.parse(text).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        if _name_of(node) in names:
            found.append(_lines(text, node, following))
    assert len(found) == len(names), f"{module} does not define all of {names}"
    return "\n\n\n".join(found)


@cache
def source(module: str) -> str:
    """The whole text of `module` of this package."""
    return files("autotune").joinpath(*module.split(".")[:-1], f"{module.rpartition('.')[2]}.py").read_text("utf-8")


def _name_of(node: ast.stmt) -> str | None:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return None


def _lines(text: str, node: ast.stmt, following: ast.stmt | None) -> str:
    """With decorators, and with the text that stands below an assignment and explains it."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    is_explained = isinstance(node, ast.Assign | ast.AnnAssign) and _is_text(following)
    last = following if is_explained else node
    assert last is not None
    return "\n".join(text.splitlines()[first - 1 : last.end_lineno])


def _is_text(node: ast.stmt | None) -> bool:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False
