"""Commands that only read, on a database made by hand; and help, which must be quick."""

import csv
import io
import json
import os
import pty
import re
import runpy
import subprocess
import sys

import pytest
import typer.main
from typer.core import TyperGroup

import autotune
from autotune.cli import app
from autotune.cli.lazy import LazyCommand
from autotune.spec.config import FIELD_ORDER
from autotune.spec.result import Measurement
from tests.building.commands import NO_WIDTH_AND_NO_COLOUR, run_here
from tests.building.studies import CAP_BYTES, MIB, measured, write_study

COMMANDS = (
    "search",
    "predict",
    "show",
    "studies",
    "plot",
    "export",
    "explain",
    "fit",
    "doctor",
    "compare",
    "report",
)
HEAVY = ("torch", "optuna", "sqlalchemy", "datasets", "plotly", "numpy")
ESCAPE = "\x1b"
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3\d|4\d|9\d|10\d)(?:;\d+)*m")

MEASUREMENTS = [
    measured(
        device_bytes=2 * CAP_BYTES,
        peak_memory_bytes=2 * CAP_BYTES,
        outcome="over_cap",
        message="over",
    ),
    measured(tokens_per_second=1500.0, compile_seconds=12.0, compile_cache="miss"),
    measured(peak_memory_bytes=10 * MIB, device_bytes=10 * MIB),
    measured(peak_memory_bytes=50 * MIB, device_bytes=50 * MIB, tokens_per_second=500.0),
    Measurement(outcome="out_of_memory", message="out of memory: 2.00 GiB more asked for"),
    None,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with two studies: `by-hand`, and `too-tight` in which nothing is feasible."""
    folder = tmp_path_factory.mktemp("commands")
    write_study(f"sqlite:///{folder}/studies/autotune.db", MEASUREMENTS)
    write_study(
        f"sqlite:///{folder}/studies/autotune.db", MEASUREMENTS, name="too-tight", cap_bytes=MIB
    )
    return folder


def run(*arguments, folder, timeout=60, **environment):
    """Runs the command as a process, with its output in pipes."""
    settings = {k: v for k, v in os.environ.items() if k not in NO_WIDTH_AND_NO_COLOUR}
    return subprocess.run(
        [sys.executable, "-m", "autotune", *arguments],
        cwd=folder,
        env={**settings, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def output(*arguments, folder, **environment):
    ended = run_here(*arguments, folder=folder, **environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def on_a_terminal(*arguments, folder, **environment):
    """What the command writes to a terminal."""
    settings = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "autotune", *arguments],
        cwd=folder,
        env={**settings, "TERM": "xterm-256color", "COLUMNS": "140", **environment},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            received = os.read(ours, 65536)
        except OSError:  # the terminal's other end is closed
            break
        if not received:
            break
        written += received
    os.close(ours)
    assert process.wait(timeout=60) == 0, written
    return written.decode()


def test_a_process_that_works_for_a_command_does_not_run_it_again(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["autotune", "--version"])
    runpy.run_module("autotune", run_name="__mp_main__")  # as multiprocessing and anyio do


# -- help ------------------------------------------------------------------------------------------

HELP_AND_MODULES = """
import json, os, runpy, sys
import autotune.cli
for arguments in json.loads(sys.argv[1]):
    if os.fork() == 0:
        sys.argv = ["autotune", *arguments]
        try:
            runpy.run_module("autotune", run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            print(json.dumps([arguments, ended.code or 0, *sorted(sys.modules)]), file=sys.stderr)
        os._exit(0)
    os.wait()
"""
HELPS = (["--help"], ["--version"], *([command, "-h"] for command in COMMANDS))


@pytest.fixture(scope="module")
def modules_of_helps(folder):
    """Returns {the words of a help: (its exit code, the modules that it imports)}.

    Each help is shown by a fork of one interpreter that has imported only the command line.
    """
    program = [sys.executable, "-c", HELP_AND_MODULES, json.dumps(HELPS)]
    ended = subprocess.run(
        program, cwd=folder, capture_output=True, text=True, timeout=120, check=True
    )
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    return {tuple(words): (code, set(modules)) for words, code, *modules in lines}


@pytest.mark.parametrize("arguments", HELPS, ids=str)
def test_help_loads_nothing_heavy(arguments, modules_of_helps):
    code, modules = modules_of_helps[tuple(arguments)]
    assert code == 0
    assert "autotune.cli" in modules
    assert set(HEAVY).isdisjoint(modules)


def command_of(name):
    """Returns a command with its options."""
    command = typer.main.get_group(app).commands[name]
    assert isinstance(command, LazyCommand)
    return command.load()


def test_the_list_of_commands_imports_no_command(modules_of_helps):
    _, modules = modules_of_helps["--help",]
    assert {name for name in modules if name.startswith("autotune.cli")} == {
        "autotune.cli",
        "autotune.cli.help",
        "autotune.cli.lazy",
        "autotune.cli.lines",
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_imports_no_other_command(command, modules_of_helps):
    _, modules = modules_of_helps[command, "-h"]
    assert {f"autotune.cli.{name}" for name in COMMANDS} & modules == {f"autotune.cli.{command}"}


def lazy_commands(group, *path):
    for name, command in group.commands.items():
        yield pytest.param(command, id=" ".join((*path, name)))
        loaded = command.load()
        if isinstance(loaded, TyperGroup):
            yield from lazy_commands(loaded, *path, name)


@pytest.mark.parametrize("command", list(lazy_commands(typer.main.get_group(app))))
def test_the_line_of_a_command_in_its_group_is_the_first_sentence_of_its_help(command):
    limit = 1000  # nothing is cut
    assert command.get_short_help_str(limit) == command.load().get_short_help_str(limit)
    assert command.help == command.get_short_help_str(limit)


def test_the_help_lists_every_command(folder):
    words = output("--help", folder=folder).split()
    assert set(COMMANDS) <= set(words)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_names_its_options_on_a_narrow_terminal(command, folder):
    text = output(command, "--help", folder=folder, COLUMNS="80")
    options = [
        name
        for parameter in command_of(command).params
        if not getattr(parameter, "hidden", False)
        for name in parameter.opts
    ]
    assert [name for name in options if name.startswith("--") and name not in text] == []


@pytest.mark.parametrize(
    ("command", "option", "default"),
    [
        ("search", "--max-mem", "all memory of the device"),
        ("search", "--device", "a GPU if there is one"),
        ("search", "--trials", "30"),
        ("search", "--sampler", "ehvi"),
        ("search", "--seed", "0"),
        ("search", "--trial-time-limit", "10m"),
        ("search", "--dataset-split", "train"),
        ("search", "--storage", "sqlite:///studies/autotune.db"),
        ("fit", "--vary", "layers"),
        ("fit", "--context", "0.6GiB"),
        ("report", "--out", "studies/STUDY-report.html"),
        ("plot", "--out", "studies/STUDY.html, studies/STUDY-KIND.html"),
    ],
)
def test_the_help_of_an_option_names_its_default(command, option, default, folder):
    shown = output(command, "--help", folder=folder, COLUMNS="240")
    before, _, examples = shown.partition("Examples:\n")
    text = " ".join([*before.split(), *examples.partition("\n\n")[2].split()])
    description = text.partition(f" {option} ")[2].partition(" --")[0]
    assert f"[default: {default}]" in description


def test_the_version_is_that_of_the_package(folder):
    assert output("--version", folder=folder).strip() == autotune.__version__


def test_without_a_command_the_help_is_shown(folder):
    ended = run_here(folder=folder)
    assert ended.returncode == 2
    assert "Usage:" in ended.stdout


# -- studies ---------------------------------------------------------------------------------------


def test_at_80_columns_a_study_has_its_pick_in_short(folder):
    printed = run_here("studies", folder=folder, COLUMNS="80").stdout
    assert printed.split()[:6] == ["study", "begun", "(UTC)", "trials", "cap", "pick"]
    assert "nothing feasible" in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert len(printed.splitlines()) <= 5


def test_studies_lists_every_study_with_its_state_and_its_pick(folder):
    by_hand, too_tight = output("studies", folder=folder).splitlines()[1:]
    assert re.match(r"by-hand .* 5/6 .*can be continued .*64.00 MiB .*trial 1", by_hand)
    assert re.match(r"too-tight .* 5/6 .*can be continued .*1.00 MiB .*nothing feasible", too_tight)


def test_studies_reads_the_database_it_is_given(folder, tmp_path):
    write_study(f"sqlite:///{tmp_path}/other.db", [measured()], name="elsewhere")
    text = output("studies", "--storage", f"sqlite:///{tmp_path}/other.db", folder=folder)
    assert "elsewhere" in text
    assert "by-hand" not in text


# -- show ------------------------------------------------------------------------------------------


def test_show_has_a_row_for_every_trial(folder):
    text = output("show", "by-hand", folder=folder)
    assert [f"trial {number}:" in text for number in range(6)] == [True] * 6


def test_show_says_which_trial_is_the_pick_and_why(folder):
    text = output("show", "by-hand", folder=folder)
    assert "Pick: #1 trial 1" in text
    assert "the fastest on the front" in text


def test_show_picks_by_the_given_preference(folder):
    assert "Pick: #2 " in output("show", "by-hand", "--prefer", "smallest", folder=folder)


def test_show_counts_the_outcomes(folder):
    text = output("show", "by-hand", folder=folder)
    assert "6 trials: 3 ok, 1 out of memory, 1 over the cap, 1 interrupted" in text


def test_show_of_a_study_in_which_nothing_fits_says_what_to_try(folder):
    text = output("show", "too-tight", folder=folder)
    assert "Nothing that was tried trains under 1.00 MiB" in text
    assert "larger --max-mem" in text


STUDY_KEYS = {
    "schema": int,
    "study": str,
    "storage": str,
    "workload": dict,
    "device": dict,
    "cap_bytes": int,
    "directions": dict,
    "trials": list,
    "front": list,
    "pick": int,
    "baseline": int,
}
TRIAL_KEYS = {
    "number": int,
    "name": str,
    "outcome": str,
    "feasible": bool,
    "config": dict,
    "peak_memory_bytes": int,
    "peak_reserved_bytes": int,
    "device_bytes": int,
    "alloc_retries": int,
    "tokens_per_second": float,
    "tokens_per_second_spread": float,
    "perplexity": float,
    "perplexity_source": str,
    "reused_from": str,
    "predicted_peak_memory_bytes": int,
    "compile_seconds": float,
    "seconds": float,
    "message": str,
}
ALWAYS_KNOWN = {"number", "outcome", "feasible", "config", "message"}


@pytest.fixture(scope="module")
def shown(folder):
    """What `show --json` prints of the study `by-hand`."""
    return json.loads(output("show", "by-hand", "--json", folder=folder))


@pytest.mark.parametrize("key", STUDY_KEYS)
def test_the_json_of_a_study_keeps_the_contract(shown, key):
    assert type(shown[key]) is STUDY_KEYS[key]


@pytest.mark.parametrize("key", TRIAL_KEYS)
def test_the_json_of_a_trial_keeps_the_contract(shown, key):
    for trial in shown["trials"]:
        assert type(trial[key]) is TRIAL_KEYS[key] or (
            trial[key] is None and key not in ALWAYS_KNOWN
        )


def test_the_json_has_every_trial_the_front_the_pick_and_the_baseline(shown):
    assert [trial["number"] for trial in shown["trials"]] == [0, 1, 2, 3, 4, 5]
    assert (shown["front"], shown["pick"], shown["baseline"]) == ([2, 1], 1, 0)
    assert (shown["schema"], shown["study"], shown["cap_bytes"]) == (1, "by-hand", CAP_BYTES)


def test_the_configuration_of_a_trial_is_flat(shown):
    for trial in shown["trials"]:
        assert set(trial["config"]) == set(FIELD_ORDER)
        assert not any(isinstance(value, dict | list) for value in trial["config"].values())


def test_what_was_not_measured_is_null(shown):
    out_of_memory = shown["trials"][4]
    assert [
        out_of_memory[key] for key in ("peak_memory_bytes", "tokens_per_second", "perplexity")
    ] == [None] * 3


def test_what_is_not_finite_is_null(tmp_path):
    write_study(
        f"sqlite:///{tmp_path}/studies/autotune.db",
        [
            measured(),
            measured(outcome="diverged", perplexity=float("inf"), final_loss=float("nan")),
        ],
    )
    trial = json.loads(output("show", "by-hand", "--json", folder=tmp_path))["trials"][1]
    assert (trial["perplexity"], trial["final_loss"]) == (None, None)


def test_the_json_of_a_study_in_which_nothing_fits_has_no_pick(folder):
    shown = json.loads(output("show", "too-tight", "--json", folder=folder))
    assert (shown["front"], shown["pick"]) == ([], None)


@pytest.mark.parametrize("option", ["--csv", "--markdown"])
def test_show_prints_a_plain_table_and_nothing_else(option, folder):
    ended = run_here("show", "by-hand", option, folder=folder)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [f"trial {number}" in ended.stdout for number in range(6)] == [True] * 6


def test_show_as_csv_has_a_row_for_every_trial(folder, shown):
    rows = list(csv.DictReader(io.StringIO(output("show", "by-hand", "--csv", folder=folder))))
    assert [row["outcome"] for row in rows] == [trial["outcome"] for trial in shown["trials"]]
    assert [row["pick"] for row in rows].index("true") == shown["pick"]


# -- report ----------------------------------------------------------------------------------------


def test_report_writes_a_page_next_to_the_studies_and_prints_where(folder):
    assert output("report", "by-hand", folder=folder).strip() == "studies/by-hand-report.html"
    page = (folder / "studies" / "by-hand-report.html").read_text()
    assert "Train with #1, trial 1:" in page
    assert "autotune report by-hand" in page


def test_report_picks_by_the_given_preference(folder, tmp_path):
    output(
        "report",
        "by-hand",
        "--prefer",
        "smallest",
        "--out",
        str(tmp_path / "page.html"),
        folder=folder,
    )
    page = (tmp_path / "page.html").read_text()
    assert "Train with #2, trial 2:" in page
    assert "autotune report by-hand --prefer smallest" in page


def test_report_says_when_the_study_was(folder):
    output("report", "by-hand", folder=folder)
    assert re.search(
        r"\d{4}-\d\d-\d\d \d\d:\d\d, last result",
        (folder / "studies/by-hand-report.html").read_text(),
    )


@pytest.mark.slow
def test_report_of_a_study_in_which_nothing_fits_is_written(folder):
    assert output("report", "too-tight", folder=folder).strip() == "studies/too-tight-report.html"
    assert (
        "Nothing that was tried trains under 1.00 MiB."
        in (folder / "studies/too-tight-report.html").read_text()
    )


@pytest.mark.parametrize("out", ["file/page.html", "folder.html", "page.pdf", "folder"])
def test_report_into_what_cannot_be_a_file_is_rejected_by_name(out, folder, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder.html").mkdir()
    ended = run_here("report", "by-hand", "--out", str(tmp_path / out), folder=folder)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert [line.partition(":")[0] for line in ended.stderr.splitlines()] == ["error", "hint"]
    assert str(tmp_path / out) in ended.stderr


# -- plot ------------------------------------------------------------------------------------------


def test_plot_writes_a_page_next_to_the_studies_and_prints_where(folder):
    assert output("plot", "by-hand", folder=folder).strip() == "studies/by-hand.html"
    assert "Pick: #1 trial 1" in (folder / "studies" / "by-hand.html").read_text()


def test_plot_creates_the_folder_of_its_file(folder, tmp_path):
    file = tmp_path / "new" / "folder" / "front.html"
    assert output("plot", "by-hand", "--out", str(file), folder=folder).strip() == str(file)
    assert file.is_file()


def test_the_page_loads_nothing_from_elsewhere(folder, tmp_path):
    output("plot", "by-hand", "--out", str(tmp_path / "front.html"), folder=folder)
    page = (tmp_path / "front.html").read_text()
    assert re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"(?!data:)", page) == []


def test_plot_into_a_path_below_a_file_is_rejected_by_name(folder, tmp_path):
    (tmp_path / "file").touch()
    ended = run_here(
        "plot", "by-hand", "--out", str(tmp_path / "file" / "front.html"), folder=folder
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert [line.partition(":")[0] for line in ended.stderr.splitlines()] == ["error", "hint"]
    assert str(tmp_path / "file" / "front.html") in ended.stderr


# -- how it is written -----------------------------------------------------------------------------

READING = (
    ["studies"],
    ["show", "by-hand"],
    ["show", "too-tight"],
    ["plot", "too-tight", "--out", "page.html"],
)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", READING, ids=" ".join)
def test_reading_ends_with_0_and_output_to_a_pipe_has_no_escape_codes(arguments, folder):
    """Whether or not something is feasible."""
    run_command = run if arguments == ["show", "by-hand"] else run_here  # one as a process
    ended = run_command(*arguments, folder=folder, TERM="xterm-256color")
    assert (ended.returncode, ESCAPE in ended.stdout) == (0, False)


@pytest.mark.slow
def test_output_to_a_terminal_has_colour(folder):
    assert COLOUR.search(on_a_terminal("show", "by-hand", folder=folder))


def test_no_color_takes_the_colour_away(folder):
    colourful = output("show", "by-hand", folder=folder, TERM="xterm-256color", FORCE_COLOR="1")
    assert COLOUR.search(colourful)
    without = output(
        "show", "by-hand", folder=folder, TERM="xterm-256color", FORCE_COLOR="1", NO_COLOR="1"
    )
    assert not COLOUR.search(without)


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error(folder):
    process = subprocess.Popen(
        [sys.executable, "-m", "autotune", "show", "by-hand", "--json"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    stderr = process.stderr.read().decode()
    process.stderr.close()
    assert (process.wait(timeout=60), stderr) == (0, "")


@pytest.mark.slow
def test_doctor_names_the_build_tools_and_the_shared_device_slots(folder):
    shown = run("doctor", "--device", "cpu", folder=folder, timeout=600).stdout
    for words in ("C compiler", "C++ compiler", "Python headers", "device slots shared with: "):
        assert words in shown
