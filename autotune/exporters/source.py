"""Source text of autotune's modules, for exported files that run without autotune.

Exported files contain the code that the trials ran. The modules are read as text, because importing
them would load torch.
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
"""Definitions of `techniques.stochastic_rounding` that a file with stochastic rounding needs."""
STEP_IN_BACKWARD = ("SteppedInBackward", "step_in_backward")
"""Definitions of `techniques.step_in_backward` that a file with updates in backward needs."""


def excerpt(module: str, *names: str) -> str:
    """Return the source of the top-level definitions `names` of `module`, in the module's order.

    `module` is a name such as "techniques.fp8". Includes decorators and docstrings, also the
    docstring below a constant. Raises AssertionError for a name that the module does not define.
    """
    definitions = _definitions(module)
    missing = set(names) - set(definitions)
    assert not missing, f"{module} does not define {missing}"
    return spaced(text for name, text in definitions.items() if name in names)


def defined_names(module: str) -> tuple[str, ...]:
    """Return the names of all top-level definitions of `module`."""
    return tuple(_definitions(module))


def spaced(texts: Iterable[str]) -> str:
    """Join `texts`: one line break between two constants, two empty lines around anything else."""
    joined = ""
    previous = ""
    for text in texts:
        if previous:
            joined += "\n" if _is_constant(previous) and _is_constant(text) else "\n\n\n"
        joined += text
        previous = text
    return joined


@cache
def source(module: str) -> str:
    """Return the whole text of `module` of this package."""
    *folders, name = module.split(".")
    return files("autotune").joinpath(*folders, f"{name}.py").read_text("utf-8")


@cache
def _definitions(module: str) -> dict[str, str]:
    """Return {name: source} of the top-level functions, classes and constants of `module`."""
    text = source(module)
    lines = text.splitlines()
    body = ast.parse(text).body
    definitions = {}
    for statement, following in zip(body, [*body[1:], None], strict=True):
        name = _defined_name(statement)
        if name is None:
            continue
        last: ast.stmt = statement
        is_constant = isinstance(statement, ast.Assign | ast.AnnAssign)
        if is_constant and following is not None and _is_string(following):
            last = following  # the docstring of the constant
        definitions[name] = "\n".join(lines[_first_line(statement) - 1 : last.end_lineno])
    return definitions


def _defined_name(statement: ast.stmt) -> str | None:
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return None


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def _is_string(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


def _is_constant(text: str) -> bool:
    return not any(line.startswith(("def ", "class ", "@", "# --")) for line in text.splitlines())
