"""The documentation says what is there: commands, options, values, files, links and examples."""

import re
import shlex
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.main import get_group

from autotune.cli import app
from autotune.cli.defaults import VARIABLE
from autotune.exporters import TARGETS
from autotune.reporting.figures import FIGURES
from autotune.spec.config import CHOICES, FIELD_ORDER
from autotune.spec.result import Outcome
from autotune.spec.space_file import load_space
from autotune.spec.study import SAMPLERS
from autotune.spec.workload import DEFAULTS_BY_DEVICE
from tests.building.commands import run_here

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MADE_BY_A_SEARCH = ("studies/autotune.db", "studies/work/", "studies/deleted/")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def on_every_page(pattern: str) -> list[tuple[str, str]]:
    """Every match of `pattern` in the documentation, with the page it is on."""
    return [
        (found, str(page.relative_to(ROOT)))
        for page in PAGES
        for found in re.findall(pattern, page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    ]


def command_lines() -> list[str]:
    """Every `autotune ...` in an indented block or between backticks, without its comment."""
    indented = {
        line.partition("#")[0].strip() for line, _ in on_every_page(r"^ +(autotune \w[^\n]*)")
    }
    return sorted(indented | {line for line, _ in on_every_page(r"`(autotune \w[^`]*)`")})


def toml_examples() -> list[str]:
    return [code for code, _ in on_every_page(r"```toml\n(.*?)```")]


def command_of(line: str) -> tuple[str, ...]:
    """The command that a line calls: `search`, `studies export` or `serve tokens add`."""
    words = line.split()[1:]
    path = words[:1]
    found: Any = get_group(app).commands.get(words[0])
    while found is not None and hasattr(found := found.load(), "commands"):
        word = words[len(path)] if len(path) < len(words) else ""
        found = found.commands.get(word)
        if found is not None:
            path.append(word)
    return tuple(path)


@cache
def help_of(command: tuple[str, ...]) -> str:
    shown = run_here(*command, "--help", folder=ROOT, COLUMNS="200")
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


def first_cells(page: str, heading: str) -> list[str]:
    """The first column of the table below the row that begins with `heading`, without backticks."""
    _, _, table = text_of(page).partition(f"\n| {heading} |")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    return [row.split("|")[1].strip().strip("`") for row in rows]


def test_there_are_commands_to_check():
    assert len(command_lines()) >= 20


@pytest.mark.parametrize("line", [line for line in command_lines() if "COMMAND" not in line])
def test_every_command_and_option_exists(line):
    shown = help_of(command_of(line))
    line, _, _ = line.partition(" -- ")  # a script's own arguments follow
    assert [word for word in shlex.split(line) if word.startswith("--") and word not in shown] == []


def test_every_option_that_is_mentioned_is_one_of_some_command():
    mentioned = {option for option, _ in on_every_page(r"`(--[a-z0-9-]+)")}
    commands = {command_of(line) for line in command_lines() if "COMMAND" not in line}
    shown = " ".join(help_of(command) for command in sorted(commands))
    assert mentioned
    assert [option for option in sorted(mentioned) if option not in shown] == []


def test_the_page_of_the_command_line_has_every_command():
    commands = get_group(app).commands
    listed = [
        cell.removeprefix("autotune ") for cell in first_cells("docs/command-line.md", "command")
    ]
    assert sorted(listed) == sorted(commands)


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        ("--layers", "layers"),
        ("--width", "width"),
        ("--heads", "heads"),
        ("--seq-len", "sequence_length"),
        ("--global-batch", "global_batch"),
        ("--steps", "steps"),
        ("--eval-sequences", "evaluation_sequences"),
    ],
)
def test_the_workload_of_each_device_is_in_the_table(option, setting):
    (row,) = re.findall(
        rf"^\| `{option}` \| (.*) \|$", text_of("docs/command-line.md"), re.MULTILINE
    )
    assert row.split(" | ") == [str(DEFAULTS_BY_DEVICE[kind][setting]) for kind in ("cpu", "cuda")]


@pytest.mark.parametrize("field", FIELD_ORDER)
def test_every_technique_is_in_the_table_with_all_its_values(field):
    (row,) = re.findall(rf"^\| {field} \| (.*) \|$", text_of("docs/searching.md"), re.MULTILINE)
    assert field not in CHOICES or row == ", ".join(CHOICES[field])


def test_every_outcome_is_explained():
    assert sorted(first_cells("docs/results.md", "outcome")) == sorted(get_args(Outcome))


def test_every_figure_is_explained():
    assert sorted(first_cells("docs/results.md", "kind")) == sorted(FIGURES)


def test_every_sampler_is_explained():
    assert sorted(first_cells("docs/samplers.md", "sampler")) == sorted(SAMPLERS)


def test_every_target_of_an_export_is_explained():
    cells = ", ".join(first_cells("docs/exporters.md", "target"))
    assert sorted(cells.split(", ")) == sorted(TARGETS)


@pytest.mark.parametrize(
    ("path", "page"), on_every_page(r"`((?:autotune|studies|search_spaces|tests|docs)/[\w/.]*)`")
)
def test_every_file_that_is_named_is_there(path, page):
    assert path in MADE_BY_A_SEARCH or (ROOT / path).exists()


@pytest.mark.parametrize(
    ("path", "page"),
    on_every_page(r"`((?:study|execution|storage|training|cli|reporting|analysis)/[\w/.]*)`"),
)
def test_every_file_of_the_package_that_is_named_is_there(path, page):
    assert (ROOT / "autotune" / path).exists()


@pytest.mark.parametrize(("target", "page"), on_every_page(r"\]\(([^)#:]+)\)"))
def test_every_link_and_picture_leads_to_a_file(target, page):
    assert ((ROOT / page).parent / target).exists()


@pytest.mark.parametrize(("target", "page"), on_every_page(r"\]\(([^):]*#[^)]+)\)"))
def test_every_link_to_a_heading_leads_to_one(target, page):
    file, _, anchor = target.partition("#")
    linked = (ROOT / page).parent / file if file else ROOT / page
    headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
    assert anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in headings}


def test_the_readme_links_to_every_page():
    linked = {target for target, page in on_every_page(r"\]\(([^)#:]+)\)") if page == "README.md"}
    assert {str(page.relative_to(ROOT)) for page in PAGES} - {"README.md"} <= linked


def test_the_tree_names_every_room():
    tree = text_of("docs/architecture.md").partition("## Rooms")[2].partition("## Ten files")[0]
    package = ROOT / "autotune"
    rooms = [path.parent.name for path in package.glob("*/__init__.py")]
    rooms += [path.parent.name for path in package.glob("*/*/__init__.py")]
    files = [path.name for path in package.glob("*.py") if not path.name.startswith("__")]
    of_one_trainer = {"pytorch", "torchtitan", "transformers"}
    expected = [f"{room}/" for room in rooms if room not in of_one_trainer] + files
    assert [name for name in expected if name not in tree] == []


def test_there_are_ten_files_to_read_first():
    assert len(first_cells("docs/architecture.md", "file")) == 10


def test_make_targets_exist():
    targets = set(re.findall(r"^([\w-]+):", text_of("Makefile"), re.MULTILINE))
    named = {name for name, _ in on_every_page(r"(?:^ +|`)make ([\w-]+)")}
    assert named
    assert named <= targets


def test_every_environment_variable_is_read_somewhere():
    files = [*(ROOT / "autotune").rglob("*.py"), ROOT / "tests" / "conftest.py"]
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    assert [
        name
        for name, _ in on_every_page(r"\b(AUTOTUNE_[A-Z_]+)")
        if f'"{name}"' not in source and not name.startswith(VARIABLE)
    ] == []


def test_every_variable_of_a_default_is_an_option_of_a_search():
    shown = help_of(("search",))
    named = {name for name, _ in on_every_page(rf"\b{VARIABLE}([A-Z_]+)")}
    assert named
    assert [name for name in named if f"--{name.lower().replace('_', '-')} " not in shown] == []


def test_the_defaults_of_the_manual_can_be_read(tmp_path, monkeypatch):
    (example,) = [code for code in toml_examples() if "# autotune.toml" in code]
    (tmp_path / "autotune.toml").write_text(example, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    root = get_group(app)
    with root.make_context("autotune", []) as parent:
        searched = root.commands["search"].make_context("search", [], parent=parent).params
        predicted = root.commands["predict"].make_context("predict", [], parent=parent).params
    assert (searched["max_mem"], searched["no_predict"]) == ("24GiB", True)
    assert (predicted["layers"], predicted["precision"]) == ("12", "bf16-mixed")


@pytest.mark.parametrize(("code", "page"), on_every_page(r"```python\n(.*?)```"))
def test_python_examples_compile(code, page):
    compile(code, page, "exec")


def test_the_search_space_of_the_manual_can_be_read(tmp_path):
    (example,) = [code for code in toml_examples() if "[techniques]" in code]
    file = tmp_path / "my.toml"
    file.write_text(example, encoding="utf-8")
    assert load_space(str(file)).techniques["precision"] == tuple(
        tomllib.loads(example)["techniques"]["precision"]
    )


def test_the_page_of_the_http_interface_has_every_request():
    from autotune.service.application import create_app
    from autotune.service.openapi import document_of
    from autotune.service.settings import ServerSettings

    paths = document_of(create_app(ServerSettings()))["paths"]
    served = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert set(first_cells("docs/http-interface.md", "request")) == served
