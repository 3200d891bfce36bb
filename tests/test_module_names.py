"""Modules and files that texts name exist; type checker and linter do not check such names."""

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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
    """Returns the names that a module binds at its top level."""
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
    """Returns the file of a module, or the folder of a namespace package, or None."""
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
