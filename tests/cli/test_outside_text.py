"""No text from outside gives a terminal, a file or a page a character that nobody can see.

Names, messages and paths of a study are hostile here, and each writer is asked for its text.
"""

import ast
import contextlib
import csv
import dataclasses
import io
import json
import logging
import os
import pty
import re
import sqlite3
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from unicodedata import category

import pytest

import autotune.cli
from autotune.analysis.pick import Preferences
from autotune.cli import print_error
from autotune.cli.dry_run import print_plan_of_server
from autotune.cli.lines import print_line, print_warning
from autotune.cli.live import LiveDisplay, PlainDisplay
from autotune.cli.search_run import StudyLocation, print_summary
from autotune.cli.serve import PrintableFormatter
from autotune.cli.tables import make_console, print_result, print_trials
from autotune.errors import InvalidInput
from autotune.reporting.figures import FIGURES, FigureOptions
from autotune.reporting.html_page import whole_page
from autotune.reporting.html_text import html_text
from autotune.reporting.plain_tables import csv_text, markdown_text
from autotune.reporting.rendering import script_json
from autotune.reporting.report.page import page
from autotune.reporting.result_html import result_html
from autotune.reporting.style import styled
from autotune.service.answers import json_bytes
from autotune.service.metrics import Metric, lines_of
from autotune.service.plain_page import plain_page
from autotune.service.trial_logs import end_of_file
from autotune.spec.result import DeviceInfo, Pick
from autotune.spec.space_file import load_space
from autotune.spec.space_text import space_text
from autotune.study.event_text import opening_lines
from autotune.study.events import (
    AttemptLost,
    Confirming,
    Notice,
    PlaceJoined,
    PlaceLeft,
    Preparing,
    StudyOpened,
    TrialBegan,
    TrialEnded,
    TrialPhase,
    WaitingForDevice,
    WaitingForStorage,
)
from autotune.study.notebook import LiveOutput
from autotune.study.progress import Progress
from tests.building.commands import run_here
from tests.building.reports import TRIALS, report_of, view_of
from tests.building.results import MIB, out_of_memory, record, shared_with, study_result, trial
from tests.building.studies import config, definition, measured, write_study
from tests.building.views import ladder_view, many_trials

CLIPBOARD = "\x1b]52;c;aGVsbG8=\x07"
HOSTILE = (
    f"a{CLIPBOARD}\x9b31m b\u202egnp.exe\u2066\u061c\u200e c\rd\x08\0 \u2028\u2029\ufeff\U000e0041"
    "\x85\udc80 [red]e[/red] f"
)
"""A trial's name may also have lines, which only tables and CSV keep."""
INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def unseen(text):
    """Returns the characters of a text that are no lines and that nobody can see."""
    return {character for character in text if category(character) in INVISIBLE} - {"\n"}


def hostile_result():
    trials = (
        record(0, name="baseline", memory=90 * MIB),
        record(1, name=HOSTILE, config=config(1), perplexity_source=shared_with(0, HOSTILE)),
        record(2, name=HOSTILE, config=config(2), reused_from=trial(5, HOSTILE)),
        out_of_memory(3, name=HOSTILE, message=HOSTILE, config=config(3)),
        record(4, outcome="crashed", message=f"{HOSTILE}\n{HOSTILE}", config=config(4)),
    )
    pick = Pick(number=1, criterion=HOSTILE, comparison=HOSTILE, warning=HOSTILE)
    result = study_result(trials, study=HOSTILE, front=(1, 2), pick=pick, baseline=0)
    workload = dataclasses.replace(
        result.workload, dataset=HOSTILE, tokenizer=HOSTILE, dataset_split=HOSTILE
    )
    return dataclasses.replace(
        result, storage=HOSTILE, workload=workload, device=hostile_device("cpu")
    )


def hostile_device(device):
    return DeviceInfo(
        device=device,
        name=HOSTILE,
        total_memory_bytes=8 * 1024 * MIB,
        versions={"torch": HOSTILE},
        others=HOSTILE,
        notes=(HOSTILE,),
    )


def hostile_events():
    study = definition("by-hand", device=hostile_device("cpu"))
    yield Preparing(what=HOSTILE)
    yield StudyOpened(
        study=HOSTILE,
        lines=tuple(
            opening_lines(
                study,
                is_new=True,
                excluded=(f"compile block: {HOSTILE}",),
                places=(HOSTILE, "cuda:1"),
                reused={HOSTILE: 2},
            )
        ),
        trials_wanted=4,
        places={HOSTILE: (), "cuda:1": ()},
    )
    yield Notice(message=HOSTILE)
    yield PlaceJoined(device=HOSTILE)
    yield PlaceLeft(device=HOSTILE, reason=HOSTILE)
    yield TrialBegan(number=1, config=config(1), name=HOSTILE, device=HOSTILE)
    yield TrialPhase(doing=HOSTILE, device=HOSTILE)
    yield WaitingForDevice(device=HOSTILE, holder=HOSTILE, place=HOSTILE)
    yield WaitingForStorage(message=HOSTILE, limit_seconds=60.0)
    yield AttemptLost(number=1, cause=HOSTILE, attempts_left=1)
    for ended in hostile_result().trials:
        yield TrialEnded(record=ended)
    yield Confirming(doing=HOSTILE, device=HOSTILE)


# -- writers ---------------------------------------------------------------------------------------


def printed(write):
    """Returns what `write` prints on a console that is not a terminal."""
    file = io.StringIO()
    write(make_console(file))
    return file.getvalue()


def on_stdout_and_stderr(write):
    file = io.StringIO()
    with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        write()
    return file.getvalue()


def a_table(width):
    def write(console):
        console.width = width
        result = hostile_result()
        print_trials(console, result, result.trials, title=HOSTILE, with_predictions=True)
        print_result(result, console)

    return printed(write)


def a_list_of_many_trials():
    result = hostile_result()
    return printed(lambda console: print_trials(console, result, result.trials * 201))


def a_summary():
    place = StudyLocation(
        name=HOSTILE, arguments=(HOSTILE,), continue_command=lambda _: f"go on {HOSTILE}"
    )
    result = hostile_result()
    return printed(
        lambda console: print_summary(result, console, place=place, wanted=9, verbose=True)
    )


def plain_progress():
    def write(console):
        display = PlainDisplay(Progress(preferences=Preferences()), console)
        for event in hostile_events():
            display(event)

    return printed(write)


def a_live_table():
    def write(console):
        display = LiveDisplay(Progress(preferences=Preferences()), console)
        for event in hostile_events():
            display(event)
            console.print(display._draw())

    return printed(write)


def a_cell_of_a_notebook():
    shown = []
    live = LiveOutput(
        Progress(preferences=Preferences()), lambda html, text: shown.extend((html, text))
    )
    for event in hostile_events():
        live(event)
        live._draw()
    return "".join(shown)


def the_plan_of_a_server():
    plan = {
        "space": HOSTILE,
        "configurations": 2,
        "values": {HOSTILE: [HOSTILE, HOSTILE]},
        "excluded": [f"{HOSTILE}: {HOSTILE}"],
        "device": {"device": HOSTILE, "name": HOSTILE},
        "cap_bytes": MIB,
        "reused": {HOSTILE: 1},
        "trials_wanted": 1,
        "ends_by_time": False,
        "trials_at_once": 1,
        "first": [{"name": HOSTILE, "label": HOSTILE, "predicted_peak_memory_bytes": None}],
        "confirm_share": 0.2,
        "variants_share": 0.15,
        "default_time_budget_seconds": None,
        "seconds_for_trials": None,
        "seconds": None,
    }
    return on_stdout_and_stderr(lambda: print_plan_of_server(plan))


def a_warning():
    with warnings.catch_warnings():
        warnings.showwarning = print_warning
        warnings.simplefilter("always")
        return on_stdout_and_stderr(lambda: warnings.warn(HOSTILE, stacklevel=1))


def a_page_of_a_figure():
    drawing = styled(FIGURES["pareto"].draw(ladder_view(many_trials()), FigureOptions()))
    page = whole_page(HOSTILE, about=HOSTILE, answer=HOSTILE, heading=HOSTILE, drawing=drawing)
    return re.sub("<script.*?</script>", "", page, flags=re.DOTALL)


def a_report():
    trials = [dataclasses.replace(each, name=HOSTILE, message=HOSTILE) for each in TRIALS]
    whole = page(report_of(view_of(trials, study=HOSTILE)))
    return re.sub("<script(?![^>]*application/json).*?</script>", "", whole, flags=re.DOTALL)


def a_traceback():
    return "".join(traceback.format_exception(InvalidInput(HOSTILE, hint=HOSTILE)))


def a_line_of_the_servers_log():
    file = io.StringIO()
    handler = logging.StreamHandler(file)
    handler.setFormatter(PrintableFormatter("%(levelname)s %(message)s"))
    logger = logging.Logger("service")
    logger.addHandler(handler)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logger.exception("failed: %s", HOSTILE)
    return file.getvalue()


def the_end_of_a_trials_log():
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trial-0.log"
        file.write_text(HOSTILE, encoding="utf-8", errors="replace")
        return end_of_file(file, most_bytes=1000).text


def an_answer_of_the_service():
    return json_bytes({"name": HOSTILE}).decode()


def a_measure():
    metric = Metric(name="m", help="h", kind="gauge", values={(("study", HOSTILE),): 1})
    return "\n".join(lines_of(metric))


WRITERS = {
    "a wide table": lambda: a_table(200),
    "a narrow table": lambda: a_table(60),
    "a list of many trials": a_list_of_many_trials,
    "a summary": a_summary,
    "plain progress": plain_progress,
    "a live table": a_live_table,
    "a cell of a notebook": a_cell_of_a_notebook,
    "a plan": the_plan_of_a_server,
    "a line": lambda: on_stdout_and_stderr(lambda: print_line(HOSTILE)),
    "an error": lambda: on_stdout_and_stderr(lambda: print_error(HOSTILE, HOSTILE)),
    "a warning": a_warning,
    "CSV": lambda: csv_text(hostile_result()),
    "Markdown": lambda: markdown_text(hostile_result()),
    "JSON": lambda: json.dumps(hostile_result().to_dict()),
    "a result in a notebook": lambda: result_html(hostile_result()),
    "HTML": lambda: html_text(HOSTILE),
    "a page of a figure": a_page_of_a_figure,
    "a report": a_report,
    "a page of the service": lambda: plain_page(title=HOSTILE, sentence=HOSTILE, hint=HOSTILE),
    "a search space": lambda: space_text(load_space("quick"), about=HOSTILE),
    "a measure": a_measure,
    "a traceback": a_traceback,
    "a line of the server's log": a_line_of_the_servers_log,
    "the end of a trial's log": the_end_of_a_trials_log,
    "an answer of the service": an_answer_of_the_service,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_writer_writes_no_character_that_nobody_can_see(writer):
    written = WRITERS[writer]()
    assert "52;c;aGVsbG8=" in written  # the text itself is there
    assert unseen(written) == set()


def test_the_data_of_a_report_show_each_character():
    data = json.loads(script_json({"name": [HOSTILE]}))
    assert unseen(data["name"][0]) == set()


def test_the_columns_of_a_table_are_as_wide_as_the_escapes(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = study_result([record(0, name="\x1b" * 5), record(1, name="b")])
    table = printed(lambda console: print_trials(console, result, result.trials))
    heads, first, second = table.splitlines()[:3]
    assert "\\x1b" * 5 in first
    end = heads.index("peak memory") + len("peak memory")
    assert first[:end].endswith("MiB")
    assert second[:end].endswith("MiB")


def test_brackets_in_a_text_are_no_markup():
    assert printed(lambda console: console.print("[red]e[/red] :dog:")) == "[red]e[/red] :dog:\n"


def test_a_number_in_csv_stays_a_number():
    result = study_result([record(0, name="-1", perplexity=-1.5)])
    row = next(csv.DictReader(io.StringIO(csv_text(result))))
    assert (row["name"], row["perplexity"]) == ("'-1", "-1.5")


# -- commands --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder whose studies database has hostile names and messages."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "studies").mkdir()
    file = folder / "studies" / "autotune.db"
    crashed = measured(outcome="crashed", perplexity=None, message="crashed")
    write_study(f"sqlite:///{file}", [measured(), crashed])
    hostile = HOSTILE.replace("\udc80", "")  # SQLite has no text for it
    with contextlib.closing(sqlite3.connect(file)) as database, database:
        database.execute("UPDATE autotune_trials SET name = ?", (hostile,))
        database.execute("UPDATE autotune_attempts SET worker = ?, cause = ?", (hostile, hostile))
        for table, column in (("trials", "measurement"), ("studies", "device")):
            rows = database.execute(f"SELECT id, {column} FROM autotune_{table}").fetchall()
            for row, text in rows:
                content = json.loads(text)
                content |= {"message": hostile} if column == "measurement" else {"name": hostile}
                database.execute(
                    f"UPDATE autotune_{table} SET {column} = ? WHERE id = ?",
                    (json.dumps(content), row),
                )
    return folder


COMMANDS = [
    ("show", "by-hand"),
    ("show", "by-hand", "--csv"),
    ("show", "by-hand", "--markdown"),
    ("studies",),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_in_a_pipe_prints_no_character_that_nobody_can_see(command, folder):
    ended = run_here(*command, folder=folder)
    assert ended.returncode in (0, 2)
    assert unseen(ended.stdout + ended.stderr) == set()


def test_json_is_ascii_with_the_very_text(folder):
    ended = run_here("show", "by-hand", "--json", folder=folder)
    assert ended.stdout.isascii()
    assert CLIPBOARD in json.loads(ended.stdout)["trials"][0]["name"]


STYLES = re.compile(r"\x1b\[[0-9;]*m")
"""Colours and bold text, the only sequences that a table on a terminal needs."""


@pytest.mark.slow
@pytest.mark.parametrize("command", [("show", "by-hand"), ("studies",)], ids=" ".join)
def test_a_terminal_gets_only_the_colours_of_a_table(command, folder):
    controller, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "autotune", *command],
        cwd=folder,
        env={**os.environ, "TERM": "xterm-256color"},
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
    ) as process:
        os.close(terminal)
        written = b""
        with contextlib.suppress(OSError):  # at its end a terminal has no more to read
            while chunk := os.read(controller, 65536):
                written += chunk
    os.close(controller)
    assert process.returncode == 0
    text = STYLES.sub("", written.decode()).replace("\r\n", "\n")
    assert "52;c" in text
    assert unseen(text) == set()


# -- the code of the commands ----------------------------------------------------------------------

WRITTEN_AS_ASCII_OR_ESCAPED = (
    "json.dumps",
    "csv_text",
    "markdown_text",
    "reference_markdown",
    "printable",
    "context.get_help",
    "tokens.add",
)


def plain_prints(tree):
    """Yield the calls of `print` whose text could hold a name from outside."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != "print":
            continue
        text = call.args[0]
        is_ours = isinstance(text, ast.Constant) or ast.unparse(text) == "__version__"
        is_escaped = isinstance(text, ast.Call) and (
            ast.unparse(text.func) in WRITTEN_AS_ASCII_OR_ESCAPED
        )
        if not is_ours and not is_escaped:
            yield ast.unparse(call)


def test_commands_print_names_only_by_way_of_a_console_or_of_print_line():
    folder = Path(autotune.cli.__file__).parent
    found = {
        file.name: calls
        for file in sorted(folder.glob("**/*.py"))
        if (calls := list(plain_prints(ast.parse(file.read_text(encoding="utf-8")))))
    }
    assert found == {}
