"""Builds the wheel, installs it on every Python of this machine that it is for, and uses it there.

A Python for which only the CUDA build of torch is to be had (gigabytes) gets the package without
torch: its commands, its pages and its databases need none. The output says what was tried where.
"""

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import tomllib
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests/storage/golden"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SPACE = """
[techniques]
checkpointing = ["none", "block"]

[workload]
layers = 2
width = 32
heads = 2
sequence_length = 32
global_batch = 4
steps = 7
warmup_steps = 2
evaluation_sequences = 4
"""


def interpreters() -> dict[str, Path]:
    """Return the Pythons of this machine that the project is for, one of each minor version."""
    supported = SpecifierSet(PROJECT["requires-python"])
    folders = [Path(folder) for folder in os.get_exec_path()]
    if pyenv := os.environ.get("PYENV_ROOT"):
        folders += sorted(Path(pyenv).glob("versions/*/bin"))
    found: dict[str, Path] = {}
    programs = [Path(sys.executable), *(file for at in folders for file in at.glob("python3.*"))]
    for program in programs:
        if not re.fullmatch(r"python(3\.\d+)?", program.name):
            continue
        asked = subprocess.run(
            [program, "-c", "import ensurepip, platform, venv; print(platform.python_version())"],
            capture_output=True,
            text=True,
            check=False,
        )
        release = asked.stdout.strip()
        if asked.returncode == 0 and release in supported:
            found.setdefault(release.rpartition(".")[0], program)
    return found


def build(folder: Path) -> Path:
    """Build the wheel of this checkout into `folder`."""
    pip(Path(sys.executable), "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (wheel,) = folder.glob("autotune-*.whl")
    return wheel


def pip(python: Path, *arguments: str) -> str:
    command = [python, "-m", "pip", "-qq", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def install(python: Path, wheel: Path) -> bool:
    """Install the wheel with what a search needs; return whether torch is among it."""
    constraints = ["--constraint", str(ROOT / "constraints.txt"), "--only-binary", ":all:"]
    planned = pip(python, "install", "--dry-run", "--report", "-", *constraints, str(wheel))
    names = [one["metadata"]["name"].lower() for one in json.loads(planned)["install"]]
    if not any(name.startswith(("nvidia-cu", "cuda-")) for name in names):
        pip(python, "install", *constraints, str(wheel))
        return True
    others = [text for text in PROJECT["dependencies"] if Requirement(text).name != "torch"]
    pip(python, "install", *constraints, *others)
    pip(python, "install", "--no-deps", str(wheel))
    return False


def use(autotune: Path, *, folder: Path, with_torch: bool) -> str:
    """Use the installed commands as a newcomer does; return what was tried."""

    def run(*arguments: str) -> str:
        ran = subprocess.run(
            [autotune, *arguments], cwd=folder, capture_output=True, text=True, check=False
        )
        if ran.returncode:
            sys.exit(f"autotune {' '.join(arguments)} ended with {ran.returncode}:\n{ran.stderr}")
        return ran.stdout

    installed = run("--version").split()[-1]
    if installed != version("autotune"):
        sys.exit(f"the wheel says version {installed}, and this checkout is {version('autotune')}")
    run("--help")
    if not with_torch:
        (folder / "studies").mkdir()
        with closing(sqlite3.connect(folder / "studies" / "autotune.db")) as database:
            database.executescript((GOLDEN / "0.2.1.sql").read_text())
        study = json.loads((GOLDEN / "0.2.1.show.json").read_text())["study"]
        run("studies")
        run("show", study)
        run("report", study)
        return "without torch, of which there is only the CUDA build: help, studies, show, report"
    (folder / "tiny.toml").write_text(SPACE)
    run("search", "--space", "tiny.toml", "--name", "tried", "--trials", "2", "--no-confirm")
    run("show", "tried")
    run("report", "tried")
    run("export", "tried", "--to", "pytorch")
    return "a search of two trials, show, report, export"


def main() -> None:
    """Say for each Python what was tried; end with 1 where something failed."""
    with tempfile.TemporaryDirectory() as temporary:
        wheel = build(Path(temporary))
        print(f"{wheel.name}: {wheel.stat().st_size / 1000:,.0f} kB", flush=True)
        for release, program in sorted(interpreters().items()):
            folder = Path(temporary) / release
            subprocess.run([program, "-m", "venv", folder / "env"], check=True)
            python = folder / "env/bin/python"
            try:
                pip(python, "install", "pip>=25.1")
                with_torch = install(python, wheel)
            except subprocess.CalledProcessError:
                print(f"Python {release}: not tried, since pip could not install what it needs")
                continue
            tried = use(folder / "env/bin/autotune", folder=folder, with_torch=with_torch)
            print(f"Python {release}: {tried}", flush=True)
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
