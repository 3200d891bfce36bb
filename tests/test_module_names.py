"""Modules and files that texts name exist; type checker and linter do not check such names."""

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "autotune"
DOTTED = re.compile(r"\bautotune(?:\.[A-Za-z_]\w*)+")
FILE_SUFFIXES = {"db", "html", "json", "lock", "toml", "yaml"}
"""`autotune.db` is a file, not a module."""
SOURCE_PATH = re.compile(
    r"(?<![\w/.-])(?:autotune|tests|studies|search_spaces|docs)/[\w./-]*\.(?:py|js|css|toml|md|c|h)\b"
)
BARE_FILE = re.compile(r"`([a-z_]+\.(?:py|js|css))`")
WRITTEN_BY_EXPORTS = {
    "train.py",
    "model.py",
    "file.py",
    "own.py",
    "autotune_launch.py",
    "autotune_trainer.py",
}
"""Names that docstrings use for a user's files or for files that an export writes."""
EXCERPTS = ("quoted_source", "excerpt", "source")
"""Functions of the exporters whose first argument names a module of the package; the others name
its definitions."""


def python_files(*folders: str) -> list[Path]:
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if "pick" not in path.parts
    )


def tracked_texts() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    suffixes = {".py", ".md", ".toml", ".c", ".h", ".js", ".html", ".css"}
    paths = [ROOT / name for name in listed.splitlines() if name != "CHANGELOG.md"]
    return [path for path in paths if path.suffix in suffixes or path.name == "Makefile"]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def definitions(path: Path) -> set[str]:
    """Return the names that a module binds at its top level."""
    if path.is_dir():
        return set()
    found: set[str] = set()
    statements = list(tree_of(path).body)
    for statement in tree_of(path).body:
        match statement:
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=for_type_checkers):
                statements += for_type_checkers  # names that a module imports when they are used
    for statement in statements:
        match statement:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                found.add(name)
            case ast.Assign(targets=targets):
                found |= {
                    one.id
                    for target in targets
                    for one in ast.walk(target)
                    if isinstance(one, ast.Name)
                }
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {name.asname or name.name for name in names}
    return found


def module_file(parts: list[str]) -> Path | None:
    """Return the file of a module, or the folder of a namespace package, or None."""
    base = PACKAGE.joinpath(*parts)
    return next(
        (path for path in (base.with_suffix(".py"), base / "__init__.py", base) if path.exists()),
        None,
    )


def leads_somewhere(dotted: str) -> bool:
    """Whether `dotted` is a module, a name that a module binds, or an attribute of such a name."""
    parts = dotted.split(".")[1:]
    for length in range(len(parts), -1, -1):
        if length and module_file(parts[:length]) is None:
            continue
        if length == len(parts):
            return True
        owner = PACKAGE / "__init__.py" if length == 0 else module_file(parts[:length])
        assert owner is not None
        return parts[length] == "__file__" or parts[length] in definitions(owner)
    return False


def named_modules() -> Iterator[tuple[str, str]]:
    for path in [*tracked_texts(), ROOT / "pyproject.toml"]:
        for dotted in DOTTED.findall(path.read_text(encoding="utf-8")):
            if dotted.split(".")[1] not in FILE_SUFFIXES:
                yield dotted, str(path.relative_to(ROOT))


def test_every_dotted_module_name_in_a_text_leads_to_a_module_or_a_name_in_it():
    names = list(named_modules())
    assert len(names) > 500  # imports are among them
    missing = sorted({(name, place) for name, place in names if not leads_somewhere(name)})
    assert not missing, missing


def text_arguments(call: ast.Call, path: Path) -> Iterator[list[str]]:
    """Return the possible texts of each argument of `call`; names are resolved in module `path`."""
    for argument in call.args:
        match argument:
            case ast.Constant(value=str() as text):
                yield [text]
            case ast.Name(id=name):
                yield assigned_texts(name, tree_of(path))
            case _:
                yield []


def assigned_texts(name: str, tree: ast.Module) -> list[str]:
    """Return every text, also in a tuple, assigned to `name` in a module or where it comes from."""
    found: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str() as module, names=names) if name in [
                one.name for one in names
            ]:
                source = module_file(module.split(".")[1:])
                assert source is not None
                found += assigned_texts(name, tree_of(source))
            case ast.Assign(
                targets=[ast.Name(id=one)], value=ast.Constant(value=str() as text)
            ) if one == name:
                found.append(text)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                pairs = zip(targets, values, strict=True)
                found += [
                    str(value.value)
                    for target, value in pairs
                    if isinstance(target, ast.Name)
                    and target.id == name
                    and isinstance(value, ast.Constant)
                ]
    return found


def excerpt_calls() -> list[tuple[Path, ast.Call]]:
    return [
        (path, node)
        for path in python_files("autotune/exporters")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in EXCERPTS
    ]


@pytest.mark.parametrize(
    ("path", "call"),
    [
        pytest.param(*one, id=f"{one[0].parent.name}/{one[0].name}:{one[1].lineno}")
        for one in excerpt_calls()
    ],
)
def test_every_excerpt_names_a_module_and_definitions_that_are_in_it(path, call):
    if path.name in ("pieces.py", "source.py"):
        pytest.skip("the functions themselves hand a name on")
    modules, *names = list(text_arguments(call, path))
    assert modules, "the module's name is not to be found in the text of the file"
    files = [module_file(module.split(".")) for module in modules]
    assert None not in files, modules
    everywhere = set.union(*(definitions(file) for file in files if file is not None))
    assert [name for found in names for name in found if name not in everywhere] == []


def test_there_are_excerpts_to_check():
    assert len(excerpt_calls()) > 30


def test_every_path_of_a_source_file_in_a_text_is_there():
    missing = {
        (found, str(path.relative_to(ROOT)))
        for path in tracked_texts()
        for found in SOURCE_PATH.findall(path.read_text(encoding="utf-8"))
        if not (ROOT / found).exists()
    }
    assert not missing, sorted(missing)


def test_every_file_that_a_docstring_names_is_in_its_folder_or_the_package():
    names = {path.name for path in PACKAGE.rglob("*") if path.is_file()} | WRITTEN_BY_EXPORTS
    missing = {
        (found, str(path.relative_to(ROOT)))
        for path in python_files("autotune")
        for found in BARE_FILE.findall(path.read_text(encoding="utf-8"))
        if found not in names
    }
    assert not missing, sorted(missing)


def test_modules_in_the_settings_of_type_checker_and_linter_are_there():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    layers = [
        module.strip()
        for contract in tools["importlinter"]["contracts"]
        for layer in contract.get("layers", [])
        for module in layer.split("|")
    ]
    checked = [
        name
        for one in tools["mypy"]["overrides"]
        for name in one["module"]
        if name.startswith("autotune.")
    ]
    assert layers
    assert checked
    assert [name for name in [*layers, *checked] if not leads_somewhere(name)] == []
