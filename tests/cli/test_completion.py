"""Completion by the protocol of typer's scripts, and in a real bash."""

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from autotune.exporters import TARGETS
from autotune.spec.config import CHOICES
from autotune.spec.space_content import named_spaces
from autotune.spec.study import SAMPLERS
from tests.building.commands import run_here
from tests.building.studies import measured, write_study


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with two studies in its database, and one in another."""
    folder = tmp_path_factory.mktemp("completion")
    url = f"sqlite:///{folder}/studies/autotune.db"
    write_study(url, [measured(), measured(), measured()], name="first")
    write_study(url, [measured()], name="second")
    write_study(f"sqlite:///{folder}/other.db", [measured()], name="elsewhere")
    return folder


def completed(line, *, folder, shell="bash"):
    """Returns what completes the last word of a line, which is empty after a blank."""
    words = line.split(" ")
    protocol = {
        "bash": {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }
    ended = run_here(folder=folder, _AUTOTUNE_COMPLETE=f"complete_{shell}", **protocol[shell])
    assert ended.stderr == ""
    return ended.stdout.strip().splitlines()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("autotune sh", ["show"]),
        ("autotune studies ", ["check", "export", "import", "trust"]),
        ("autotune search --max-m", ["--max-mem"]),
        (
            "autotune search --no-",
            ["--no-predict", "--no-confirm", "--no-callback", "--no-streaming"],
        ),
        ("autotune search --space ", list(named_spaces())),
        ("autotune search --sampler ", list(SAMPLERS)),
        ("autotune search --prefer f", ["fastest"]),
        ("autotune search --tokenizer b", ["bytes", "bpe"]),
        ("autotune search --name ", ["second", "first"]),
        ("autotune predict --precision bf16-", ["bf16-mixed", "bf16-true", "bf16-stochastic"]),
        ("autotune fit --vary ", ["layers", "width", "seq-len", "micro-batch", "rank", "devices"]),
        ("autotune fit --attention ", list(CHOICES["attention"])),
        ("autotune show ", ["second", "first"]),
        ("autotune show --storage sqlite:///other.db ", ["elsewhere"]),
        ("autotune compare first ", ["second", "first"]),
        ("autotune plot first lad", ["ladder"]),
        ("autotune export first --to ", list(TARGETS)),
        ("autotune confirm ", ["second", "first"]),
        ("autotune studies export ", ["second", "first"]),
        ("autotune search --script ", []),  # the shell offers files
        ("autotune show --storage nonsense ", []),
        ("autotune search --nonsense ", []),
    ],
)
def test_what_may_come_next_is_offered(line, expected, folder):
    assert completed(line, folder=folder) == expected


@pytest.mark.parametrize(
    ("shell", "expected"),
    [
        ("zsh", '"bf16-true"'),
        ("fish", "bf16-true"),
    ],
)
def test_every_shell_gets_its_own_form(shell, expected, folder):
    offered = completed("autotune predict --precision bf16-", folder=folder, shell=shell)
    assert expected in offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
@pytest.mark.parametrize("command", ["search", "predict", "plot", "fit", "studies"])
def test_a_shell_that_shows_help_gets_every_option(shell, command, folder):
    text = "\n".join(completed(f"autotune {command} --", folder=folder, shell=shell))
    assert "--storage" in text or "--max-mem" in text


def test_completing_changes_nothing(tmp_path):
    assert completed("autotune show ", folder=tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_completing_does_not_upgrade_an_older_database(tmp_path):
    (tmp_path / "studies").mkdir()
    file = tmp_path / "studies" / "autotune.db"
    shutil.copyfile(Path(__file__).parents[1] / "storage" / "data" / "schema-2.db", file)
    before = file.read_bytes()
    assert completed("autotune show ", folder=tmp_path) != []
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.slow
def test_the_script_works_in_bash(folder, tmp_path):
    shell = shutil.which("bash")
    if shell is None:
        pytest.skip("there is no bash here")
    program = tmp_path / "autotune"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m autotune "$@"\n')
    program.chmod(0o755)
    script = """
        eval "$(autotune --show-completion)"
        COMP_WORDS=(autotune show "")
        COMP_CWORD=2
        _autotune_completion autotune
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        [shell, "--norc", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.stdout.split(), ended.stderr) == (["second", "first"], "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_is_installed_in_the_files_of_the_shell(shell, tmp_path, monkeypatch):
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, f"/bin/{shell}"))
    ended = run_here("--install-completion", folder=tmp_path, HOME=str(tmp_path))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"{shell} completion installed in {tmp_path}" in ended.stdout
    written = "".join(file.read_text() for file in Path(tmp_path).rglob("*") if file.is_file())
    assert f"complete_{shell}" in written


def test_a_name_that_a_terminal_cannot_show_completes_nothing(tmp_path):
    write_study(f"sqlite:///{tmp_path}/studies/autotune.db", [measured()], name="shown")
    write_study(f"sqlite:///{tmp_path}/studies/autotune.db", [measured()], name="hidden")
    with closing(sqlite3.connect(tmp_path / "studies" / "autotune.db")) as database, database:
        database.execute("UPDATE autotune_studies SET name = char(27) WHERE name = 'hidden'")
    assert completed("autotune show ", folder=tmp_path) == ["shown"]
