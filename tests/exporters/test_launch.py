"""The launcher sets what only code can set, then runs the user's script unchanged."""

import subprocess
import sys

import pytest

from autotune.exporters.export import Export
from autotune.exporters.launch import FILE, is_needed, launcher
from autotune.spec.config import TrainingConfig
from tests.exporters.readers.launcher import process_settings
from tests.exporters.recipes import recipe

SCRIPT = """
import os, sys
import neighbour
print(__name__, sys.argv, os.path.basename(__file__), neighbour.WORD, "torch" in sys.modules)
"""


def launched(config):
    export = Export(files={FILE: launcher(recipe(config))}, command=FILE)
    return process_settings(export)


@pytest.mark.parametrize(
    ("config", "setting", "value"),
    [
        (TrainingConfig(compile="block", memory_budget=0.3), "memory_budget", 0.3),
        *(
            (TrainingConfig(compile="model", compile_mode=mode), "compile_mode", mode)
            for mode in ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
        ),
        (TrainingConfig(precision="bf16-mixed", attention="math"), "attention", "math"),
        (TrainingConfig(precision="bf16-mixed", attention="cudnn"), "attention", "cudnn"),
        (TrainingConfig(allocator="expandable"), "allocator", "expandable"),
        (TrainingConfig(precision="tf32"), "tf32", True),
    ],
    ids=str,
)
def test_a_setting_of_the_process_is_made_and_nothing_else(config, setting, value):
    plain = {"memory_budget": 1.0, "attention": "auto", "allocator": "default", "tf32": False}
    plain["compile_mode"] = "default"
    assert is_needed(config)
    assert launched(config) == {**plain, setting: value}


def test_a_plain_configuration_needs_none():
    assert not is_needed(
        TrainingConfig(checkpointing="block", compile="model", optimizer_fusion="kernel")
    )


@pytest.mark.parametrize("command", [["train.py"], ["-m", "package.train"]], ids=str)
def test_a_script_runs_as_by_itself(tmp_path, command):
    (tmp_path / "package").mkdir()
    for folder in (tmp_path, tmp_path / "package"):
        (folder / "train.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("WORD = 'beside'")
    (tmp_path / FILE).write_text(launcher(recipe(TrainingConfig(allocator="expandable"))))
    arguments = [sys.executable, FILE, *command, "--layers", "3"]
    ran = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=True)
    name, rest = ran.stdout.split(maxsplit=1)
    assert name == "__main__"
    assert "'--layers', '3'] train.py beside False" in rest


def test_without_a_script_it_prints_its_usage(tmp_path):
    (tmp_path / FILE).write_text(launcher(recipe(TrainingConfig(allocator="expandable"))))
    ran = subprocess.run(
        [sys.executable, FILE], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode != 0
    assert f"python {FILE} train.py" in ran.stderr
