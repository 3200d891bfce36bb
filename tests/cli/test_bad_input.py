"""Every mistake on the command line ends with exit code 2, an `error:` line and a `hint:` line.

The table of mistakes is `mistakes.py`. Each is run in this process, in a folder with files that are
not what they seem (`mistaken_files.py`); a few are run as commands in a separate process.
"""

import os
import subprocess
import sys
from dataclasses import fields

import pytest
from typer.main import get_command

from autotune import cli
from autotune.spec import published_table
from autotune.spec import space_file as reader
from autotune.spec.config import FIELD_ORDER
from tests.cli.mistaken_files import write_files
from tests.cli.mistaken_spaces import SPACES, space_file
from tests.cli.mistakes import LATE, all_mistakes, mistakes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The working folder of all commands; they must not add anything to it."""
    folder = tmp_path_factory.mktemp("mistakes")
    write_files(folder)
    before = content_of(folder)
    yield folder
    assert content_of(folder) == before


def content_of(folder):
    return {str(path) for path in folder.rglob("*")}


@pytest.fixture
def rejected(folder, monkeypatch, capsys):
    """rejected(["show", "nope"]) runs the command and returns its error and hint.

    It checks that the command is rejected as all mistakes are.
    """
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")

    def rejected(arguments):
        before = set(os.listdir())
        monkeypatch.setattr(sys, "argv", ["autotune", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert set(os.listdir()) == before
        return checked(ended.value.code, *capsys.readouterr())

    return rejected


def checked(exit_code, stdout, stderr):
    """Returns the error and the hint; fail if anything else was printed."""
    assert "Traceback" not in stderr, stderr
    assert exit_code == 2, stderr
    lines = stderr.split("\n")
    assert [line.partition(": ")[0] for line in lines] == ["error", "hint", ""], stderr
    assert all(line.isprintable() and not line.endswith(": ") for line in lines), stderr
    assert stdout == ""
    return lines[:2]


def case_name(arguments):
    words = (ascii(word[:40])[1:-1] for word in arguments)
    return " ".join(word or "''" for word in words)


def _marked(arguments):
    """Mark the datasets that another process reads: `tests/data/test_validation.py` reads all."""
    words = " ".join(arguments)
    is_read_elsewhere = words.startswith("search --dataset data/") and ".txt" not in words
    return pytest.param(arguments, marks=[pytest.mark.slow] if is_read_elsewhere else [])


@pytest.mark.usefixtures("one_trial_server")
@pytest.mark.parametrize(
    "arguments", [_marked(arguments) for arguments in all_mistakes()], ids=case_name
)
def test_a_mistake_is_rejected_with_an_error_and_a_hint_and_leaves_nothing(arguments, rejected):
    rejected(arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["search", "--max-mem", "8,5GiB"], "'8,5GiB'"),
        (
            ["search", "--space", space_file("techniques/unknown")],
            "unknown key 'precison' in techniques",
        ),
        (
            ["search", "--space", space_file("workload.steps")],
            "workload.steps: Invalid steps: datetime.date(2024, 1, 1)",
        ),
        (["search", "--bogus"], "--bogus"),
        (["search", "--name", "\x1b[31m\nerror: x"], r"'\x1b[31m\nerror: x'"),
        (["show", "nope", "--storage", "sqlite:///garbage.db"], "sqlite:///garbage.db"),
        (["frobnicate"], "'frobnicate'"),
    ],
    ids=lambda value: case_name(value) if isinstance(value, list) else "",
)
def test_the_error_names_what_is_wrong(arguments, named, rejected):
    assert named in rejected(arguments)[0]


@pytest.mark.parametrize(
    ("line", "error", "hint"),
    [
        ("search --trials abc", "Invalid --trials: 'abc'", "whole number from 1"),
        ("search --seed 1.5", "Invalid --seed: '1.5'", "use a whole number"),
        ("search --max-mem 8", "Invalid --max-mem: '8'", "did you mean 8GiB?"),
        (
            "search --learning-rate adam=1",
            "Invalid --learning-rate: 'adam=1'",
            "did you mean 'adamw'",
        ),
        ("search --max-mem 8gib", "'8gib' is not a memory size", "write 8GiB"),
        ("search --max-mem=-5MiB", "'-5MiB' is not a memory size", "a size is positive"),
        ("search --max-mem 8G", "'8G' is not a memory size", "write 8GiB or 8GB"),
        ("show x --tolerance speed=5%", "'speed=5%'", "speed=0.05"),
        ("show x --max-perplexity-increase 5%", "'5%'", "a share instead of percent: 0.05"),
        ("export x", "--to", "Trainer to export to: pytorch"),
        ("search --script a.py b/c.py", "'b/c.py' is no option", "--script a.py ... -- b/c.py"),
        ("search --script a.py x.py -- y", "'x.py' is no option", "--script a.py ... -- x.py y"),
        ("show x 3", "autotune show takes no argument '3'", "autotune explain x 3 shows the peak"),
        ("confirm x 3", "takes no argument '3'", "did you mean --trial 3?"),
        ("doctor 3", "autotune doctor takes no argument '3'", "see autotune doctor --help"),
        ("fit real --context 1GiB --storage sqlite:///real.db", "1.00 GiB", "--context"),
    ],
)
def test_the_hint_is_the_form_that_works(line, error, hint, rejected, folder):
    (folder / "a.py").write_text("import autotune\n")
    try:
        first, second = rejected(line.split())
    finally:
        (folder / "a.py").unlink()
    assert error in first
    assert hint in second


def test_a_misspelt_option_is_answered_with_a_near_one(rejected):
    assert "--trials" in " ".join(rejected(["search", "--trails", "5"]))


def test_a_wrong_option_is_answered_with_the_help_of_its_own_command(rejected):
    assert rejected(["plot", "--bogus"])[1] == "hint: see autotune plot --help"


@pytest.mark.parametrize("letters", ["\ufeff", ""])
def test_a_search_space_may_begin_with_a_byte_order_mark_and_end_its_lines_as_windows_does(
    letters, tmp_path
):
    (tmp_path / "space.toml").write_text(
        f'{letters}[techniques]\r\nprecision = ["fp32"]\r\n', newline=""
    )
    assert reader.load_space(str(tmp_path / "space.toml")).techniques == {"precision": ("fp32",)}


# -- as commands -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["search", "--max-mem", "8,5GiB"],
        ["search", "--name", "half a letter \udcff"],
    ],
    ids=case_name,
)
def test_a_command_is_rejected_as_it_is_in_this_process(arguments, folder):
    ended = subprocess.run(
        [sys.executable, "-m", "autotune", *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "80"},
        check=False,
    )
    checked(ended.returncode, ended.stdout, ended.stderr)


# -- the table is whole ----------------------------------------------------------------------------


def commands(of, *path):
    """Returns {path of the command: its parameters} for every command and group below `of`."""
    found = {path: of.params}
    for name, command in getattr(of, "commands", {}).items():
        found |= commands(command.load(), *path, name)
    return found


COMMANDS = commands(get_command(cli.app))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command) or "autotune")
def test_every_option_of_a_command_stands_in_a_mistake(command):
    lines = [line for line in mistakes() if tuple(line[: len(command)]) == command]
    listed = {word.partition("=")[0] for line in lines for word in line}
    options = {
        name
        for parameter in COMMANDS[command]
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("-") and name not in ("-h", "--help")
    }
    assert lines
    assert options <= listed, f"add a line with {options - listed} to mistakes.py"


def test_every_key_of_a_search_space_stands_in_a_mistake():
    tables = {
        "techniques": FIELD_ORDER,
        "techniques.memory_budget": ("from", "to", "step"),
        "conditions": ("if", "then"),
        "configurations": ("name",),
        "workload": reader.WORKLOAD_KEYS,
        "reference": tuple(field.name for field in fields(published_table.Reference)),
        "reference.rows": published_table.ROW_KEYS,
    }
    keys = {*reader.TABLES, *(f"{table}.{key}" for table, keys in tables.items() for key in keys)}
    assert keys <= {name.partition("/")[0] for name in SPACES}


def test_what_only_torch_can_tell_is_in_the_table_of_the_study_of_reliability():
    assert {line[1] for line in mistakes(LATE)} >= {"--device", "--model", "--script"}
