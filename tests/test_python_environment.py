"""Processes that autotune starts import the autotune that starts them."""

import subprocess
import sys
from pathlib import Path

from autotune.system.python_environment import python_environment

ROOT = Path(__file__).parents[1]


def ended(*arguments, folder):
    return subprocess.run(
        [sys.executable, "-S", "-P", *arguments],  # -S: without what is installed
        cwd=folder,
        env=python_environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def test_another_python_finds_a_checkout_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    program = "import autotune.units; print(autotune.units.__file__)"
    found = ended("-c", program, folder=tmp_path)
    assert found.stdout.strip() == str(ROOT / "autotune" / "units.py"), found.stderr


def test_no_room_of_the_package_is_a_module_of_its_own_there(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    program = "import importlib.util; print(importlib.util.find_spec('models'))"
    assert ended("-c", program, folder=tmp_path).stdout.strip() == "None"
