"""Puts modules of `autotune.shipped` and code for one configuration into a file that runs alone.

The modules are read as text, because importing them would load torch. A file has the imports of its
parts at its top, and below them each part without its imports. A part brings the modules that it
imports from `autotune.shipped`, ahead of itself.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from autotune.spec.optimizers import OPTIMIZERS
from autotune.system.syntax_trees import syntax_tree

BLOCKS = "autotune_blocks.py"
"""Checkpoints, compiles or converts the blocks of a model by one line in the user's script."""
CALLBACK = "autotune_callback.py"
"""A callback for Lightning."""
OPTIMIZER_FILES = tuple(
    f"{module}.py" for facts in OPTIMIZERS.values() for module in facts.shipped_modules
)
"""The optimizers that no package has, and what they need."""

_PACKAGE = "autotune.shipped"
_WRITTEN = "autotune.shipped.script.written"
"""Declares what an exporter writes itself: there is no module to put into the file."""


@dataclass(frozen=True)
class Part:
    """Top-level statements of Python, the imports that they need, and the modules to put first."""

    text: str
    imports: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


def code(text: str) -> Part:
    """Returns `text` as a part. Its imports, if any, are its first lines."""
    text = text.strip("\n")
    statements = syntax_tree(text).body
    leading = []
    for statement in statements:
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            break
        leading.append(statement)
    if not leading:
        return Part(text)
    imports = []
    modules = []
    for statement in leading:
        name = statement.module if isinstance(statement, ast.ImportFrom) else None
        if name == _WRITTEN:
            continue
        if name is not None and name.startswith(_PACKAGE):
            modules.append(name.removeprefix(f"{_PACKAGE}."))
        else:
            imports.append(ast.unparse(statement))
    lines = text.splitlines()[leading[-1].end_lineno :]
    return Part("\n".join(lines).strip("\n"), tuple(imports), tuple(modules))


def shipped(*modules: str) -> Part:
    """Returns a part that consists of modules of `autotune.shipped`, such as "gpt"."""
    return Part("", modules=modules)


@cache
def _module(name: str) -> Part:
    """Returns a module of `autotune.shipped` without its docstring."""
    return code(_docstring_and_rest(f"{name.replace('.', '/')}.py")[1])


@cache
def shipped_text(file: str) -> str:
    """Returns a file of `autotune.shipped` as text that runs alone."""
    docstring, rest = _docstring_and_rest(file)
    part = code(rest)
    return f"{docstring}\n\n{joined([part]) if part.modules else rest}"


def _docstring_and_rest(file: str) -> tuple[str, str]:
    text = files("autotune").joinpath("shipped", file).read_text("utf-8")
    lines = text.splitlines(keepends=True)
    end = syntax_tree(text).body[0].end_lineno
    return "".join(lines[:end]).rstrip("\n"), "".join(lines[end:]).lstrip("\n")


def shipped_files(lines: Iterable[str]) -> dict[str, str]:
    """Returns {name: text} of the files whose module is named in `lines`."""
    text = " ".join(lines)
    names = (BLOCKS, *OPTIMIZER_FILES)
    return {name: shipped_text(name) for name in names if name.removesuffix(".py") in text}


def banner(title: str) -> Part:
    """Returns a comment line with the title of a section."""
    return Part(f"# -- {title} ".ljust(100, "-"))


def joined(parts: Iterable[Part]) -> str:
    """Returns the text of all parts below their imports; each module is in it once."""
    everything = list(_with_modules(parts, set()))
    statements = sorted({statement for part in everything for statement in part.imports})
    imports = _merged(statements)
    standard = [statement for statement in imports if not _is_third_party(statement)]
    others = [statement for statement in imports if _is_third_party(statement)]
    blocks = ["\n".join(lines) for lines in (standard, others) if lines]
    blocks.append(_spaced(part.text for part in everything if part.text))
    return "\n\n".join(blocks) + "\n"


def _with_modules(parts: Iterable[Part], present: set[str]) -> Iterator[Part]:
    """Yield the parts, each after the modules that it needs and that are not `present` yet."""
    for part in parts:
        for module in part.modules:
            if module not in present:
                present.add(module)
                yield from _with_modules([_module(module)], present)
        yield part


def _merged(statements: Iterable[str]) -> list[str]:
    """Returns the imports in the usual order, with one statement per module."""
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


def _spaced(texts: Iterable[str]) -> str:
    """Join `texts`: one line break between two constants, two empty lines around anything else."""
    text = ""
    previous = ""
    for following in texts:
        if previous:
            text += "\n" if _is_constant(previous) and _is_constant(following) else "\n\n\n"
        text += following
        previous = following
    return text


def _is_constant(text: str) -> bool:
    return not any(line.startswith(("def ", "class ", "@", "# --")) for line in text.splitlines())
