"""The help of the commands: headings, the everyday options first, examples, whole sentences."""

import re
import shlex

import pytest
import typer.main

from autotune.cli import app
from autotune.cli.help import EXAMPLES, MOST_UNGROUPED
from autotune.cli.lazy import LazyGroup
from autotune.spec.setting import EVERYDAY, GROUPS, options_of
from autotune.spec.workload import Workload
from autotune.study.request import SearchRequest
from tests.building.commands import run_here

ROOT = typer.main.get_group(app)


def commands(group=ROOT, path=()):
    """Yield (words of the command, the command) of all commands, and of the program itself."""
    yield path, group
    for name, lazy in group.commands.items():
        command = lazy.load()
        if isinstance(command, LazyGroup):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(commands())


def help_of(*words, folder, columns="80"):
    ended = run_here(*words, "--help", folder=folder, COLUMNS=columns)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def headings(text):
    return re.findall(r"^(\S.*):$", text, re.MULTILINE)


def test_the_help_of_a_search_has_its_options_under_headings_in_order(tmp_path):
    found = headings(help_of("search", folder=tmp_path))
    assert found[:2] == ["Examples", EVERYDAY]
    groups = [heading for heading in found if heading in GROUPS]
    assert groups == [group for group in GROUPS if group in groups]
    assert len(groups) >= 5


def test_the_eleven_everyday_options_of_a_search_come_first(tmp_path):
    text = help_of("search", folder=tmp_path)
    everyday = text.partition(f"{EVERYDAY}:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^  (?:-\w, )?(--[a-z-]+)", everyday, re.MULTILINE) == [
        "--max-mem",
        "--space",
        "--name",
        "--device",
        "--trials",
        "--time-budget",
        "--from",
        "--dry-run",
        "--model",
        "--script",
        "--dataset",
    ]


@pytest.mark.parametrize("kind", [SearchRequest, Workload])
def test_every_declared_option_has_a_group(kind):
    typed = [option for option in options_of(kind).values() if option.is_typed]
    assert [option.flag for option in typed if option.group not in GROUPS] == []


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_with_many_options_has_all_of_them_but_help_under_a_heading(words):
    options = [p for p in COMMANDS[words].params if p.param_type_name == "option" and not p.hidden]
    if len(options) >= MOST_UNGROUPED:
        assert [p.opts for p in options if p.rich_help_panel not in GROUPS] == []


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("columns", ["80", "200"])
def test_help_cuts_neither_sentences_nor_names(words, columns, tmp_path):
    text = help_of(*words, folder=tmp_path, columns=columns)
    assert re.findall(r"[a-z,]\.\.\.", text) == []
    assert re.findall(r"--[a-z-]+-\n", text) == []
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_help_of_every_command_has_examples(words, tmp_path):
    text = help_of(*words, folder=tmp_path)
    examples = EXAMPLES[" ".join(words)]
    assert examples
    assert [line for line, _ in examples if line not in text] == []


@pytest.mark.parametrize("line", [line for group in EXAMPLES.values() for line, _ in group])
def test_an_example_is_a_command_line_that_can_be_parsed(line):
    words = shlex.split(line.partition(">")[0])
    assert words[0] == "autotune"
    paths = [tuple(words[1 : 1 + length]) for length in (3, 2, 1)]
    path = next(path for path in paths if path in COMMANDS)
    assert COMMANDS[path].make_context(path[-1], words[1 + len(path) :]).args == []
