"""Packages that run in the process of a search, a report or a command do not import torch."""

import subprocess
import sys
import tomllib
from pathlib import Path

import autotune

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(autotune.__file__).parent
LAYERS, WITHOUT_TORCH = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
    "importlinter"
]["contracts"]

IMPORT_ALL = """
import importlib, sys
for module in sys.stdin.read().split():
    importlib.import_module(module)
    if found := sorted({"torch", "datasets"} & set(sys.modules)):
        sys.exit(f"importing {module} has loaded {found}")
"""


def modules_of(room: str) -> list[str]:
    """Returns the dotted names of a room's modules that the process of a search may import."""
    base = PACKAGE.parent.joinpath(*room.split("."))
    files = sorted(base.rglob("*.py")) if base.is_dir() else [base.with_suffix(".py")]
    dotted = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in files]
    return [name.removesuffix(".__init__") for name in dotted]


def test_importing_every_module_of_these_rooms_loads_neither_torch_nor_datasets():
    modules = [module for room in WITHOUT_TORCH["source_modules"] for module in modules_of(room)]
    ran = subprocess.run(
        [sys.executable, "-P", "-c", IMPORT_ALL],
        input=" ".join(["autotune", *modules]),
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stderr == ""


def test_importing_autotune_loads_no_library_that_takes_long():
    """Training scripts do it: their own imports should decide how long they take."""
    slow = {"huggingface_hub", "numpy", "optuna", "plotly", "sqlalchemy", "tokenizers"}
    code = f"import sys, autotune; print(*sorted({slow} & set(sys.modules)))"
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == ""


def test_every_room_has_a_layer():
    layers = {module.strip() for layer in LAYERS["layers"] for module in layer.split("|")}
    files = {path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")}
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {f"autotune.{name}" for name in files | folders} == layers


def test_the_page_of_a_room_that_needs_torch_is_free_of_it():
    """`import autotune` imports `training`; help texts may import `predictor`."""
    code = "import sys, autotune.training, autotune.predictor; sys.exit('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-P", "-c", code], env={"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 0
