"""The README says what is there: its commands, options, values, files and length."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.spec.config import CHOICES, FIELD_ORDER

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = sorted(
    {
        line.partition("#")[0].strip()
        for line in README.splitlines()
        if re.match(r"\s+autotune \w", line)
    }
    | set(re.findall(r"`(autotune \w[^`]*)`", README))
)


def run_help(command: str) -> str:
    shown = subprocess.run(
        [sys.executable, "-m", "autotune", command, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "200"},
    )
    return shown.stdout


def test_there_are_commands_to_check():
    assert len(COMMANDS) >= 9


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_and_option_exists(line):
    _, command, *words = shlex.split(line)
    shown = run_help(command)
    assert [word for word in words if word.startswith("--") and word not in shown] == []


@pytest.mark.parametrize("field", FIELD_ORDER)
def test_every_technique_is_in_the_table_with_all_its_values(field):
    (row,) = re.findall(rf"^\| {field} \| (.*) \|$", README, re.MULTILINE)
    assert field not in CHOICES or row == ", ".join(CHOICES[field])


@pytest.mark.parametrize(
    "path", re.findall(r"`((?:autotune|studies|search_spaces)/[\w/.]*)`", README)
)
def test_every_file_it_names_is_there(path):
    if path not in ("studies/autotune.db", "studies/work/"):  # made by a search
        assert (ROOT / path).exists()


def test_the_tree_names_every_package_and_module():
    tree = README.partition("## The tree")[2]
    entries = [
        path
        for path in (ROOT / "autotune").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    ]
    names = [path.name for path in entries if not path.name.startswith("__")]
    assert [name for name in names if name not in tree] == []


def test_make_targets_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make (\w+) ", README)) <= targets | {"sure"}


def test_it_is_at_most_200_lines_long():
    assert len(README.splitlines()) <= 200


def test_pictures_are_there():
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README)
    assert pictures
    assert all((ROOT / picture).is_file() for picture in pictures)


def test_the_python_example_is_valid():
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        compile(block, "README.md", "exec")
