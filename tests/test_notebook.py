"""The example notebook runs from its first cell to its last, and a search shows its progress there.

Its cells are executed in order in this process, by the standard library: a kernel would add forty
packages to the tests. The kernel's display is a stand-in.
"""

import ast
import json
import sys
import types
from pathlib import Path
from typing import ClassVar

import pytest

from autotune.analysis.pick import Preferences
from autotune.errors import InvalidInput
from autotune.study import notebook
from autotune.study.events import (
    Confirming,
    Notice,
    Preparing,
    StudyOpened,
    TrialBegan,
    TrialEnded,
)
from autotune.study.notebook import LiveOutput, cell_output, is_notebook, status_line
from autotune.study.progress import Progress
from tests.building.results import record
from tests.building.studies import config
from tests.building.views import HOSTILE

FILE = Path(__file__).resolve().parents[1] / "docs" / "notebook.ipynb"
CELLS = [cell for cell in json.loads(FILE.read_text())["cells"] if cell["cell_type"] == "code"]


def run_cell(cell, names):
    """Execute a cell and return what a notebook would show of its last expression."""
    tree = ast.parse("".join(cell["source"]))
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "cell", "exec"), names)
        return None
    exec(compile(ast.Module(tree.body[:-1], []), "cell", "exec"), names)
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    as_html = getattr(value, "_repr_html_", None)
    # A figure of plotly begins a browser's worth of scripts.
    return str(value) if as_html is None or hasattr(value, "to_plotly_json") else as_html()


@pytest.mark.slow
def test_the_example_notebook_runs(tmp_path, monkeypatch, one_trial_server):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    silent = ["".join(cell["source"]) for cell in CELLS if not run_cell(cell, names)]
    assert [source for source in silent if not source.startswith(("import ", "print("))] == []
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "exported" / "train.py").exists()


def test_the_example_notebook_was_executed_in_order_without_an_error():
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    outputs = [output for cell in CELLS for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]


# -- progress --------------------------------------------------------------------------------------


@pytest.fixture
def shown():
    return []


@pytest.fixture
def live(shown):
    progress = Progress(preferences=Preferences())
    return LiveOutput(progress, lambda html, text: shown.append((html, text)))


def opened(**changes):
    return StudyOpened(**{"study": "new", "trials_wanted": 2, **changes})


def test_what_a_search_prepares_is_shown_before_the_study_is_open(live, shown):
    with live:
        live(Preparing(what="tokenizing the text"))
        live._draw()
    assert any("tokenizing the text" in html for html, _ in shown)


def test_running_trials_results_and_notes_are_shown(live, shown):
    with live:
        live(opened())
        live(Notice(message="the disk is slow"))
        live(TrialBegan(number=0, config=config(0), name="baseline"))
        live._draw()
        assert f"#0 baseline: {config(0).describe()}" in shown[-1][0]
        live(TrialEnded(record=record(0, config=config(0), speed=1234.0)))
        live._draw()
    html, _ = shown[-2]
    assert "the disk is slow" in html
    assert "1,234" in html
    assert 'max="2" value="1"' in html
    assert shown[-1][0].startswith("<div>")
    assert "Done" in shown[-1][0]


def test_the_bar_of_a_search_that_is_done_is_full_where_it_wanted_more_trials(live, shown):
    with live:
        live(opened())
        live(TrialEnded(record=record(0, config=config(0), speed=1234.0)))
    assert 'max="1" value="1"' in shown[-1][0]


def test_what_a_confirmation_measures_is_shown(live, shown):
    with live:
        live(opened())
        live(Confirming(doing="#7 in turn with #0"))
        live._draw()
        assert "measuring #7 in turn with #0" in shown[-1][0]


def test_the_time_of_a_phase_is_shown_while_nothing_happens(live, shown, monkeypatch):
    monkeypatch.setattr(notebook, "_SECONDS_BETWEEN_UPDATES", 0.01)
    with live:
        live(Preparing(what="waiting"))
        live._ended.wait(0.5)
    assert len({html for html, _ in shown if "waiting, " in html}) > 1


def test_a_stopped_search_says_that_nothing_is_lost(live, shown):
    with pytest.raises(KeyboardInterrupt), live:
        raise KeyboardInterrupt
    assert "every finished trial is stored, run the cell again to continue" in shown[-1][0]


def test_names_of_users_are_escaped_in_the_progress(live, shown):
    with live:
        live(opened())
        live(Notice(message=HOSTILE))
        live(TrialEnded(record=record(0, name=HOSTILE, config=config(0))))
    assert shown
    assert not [html for html, _ in shown if "<script" in html or "<img" in html]


class FakeHandle:
    """IPython's handle of one output of a cell."""

    calls: ClassVar[list] = []

    def display(self, bundle, *, raw):
        self.calls.append(("display", bundle["text/plain"]))

    def update(self, bundle, *, raw):
        self.calls.append(("update", bundle["text/plain"]))


@pytest.fixture
def kernel(monkeypatch):
    """A stand-in for IPython in a kernel; its value are the calls of the handle."""
    shell = types.SimpleNamespace(kernel=object())
    display = types.SimpleNamespace(DisplayHandle=FakeHandle)
    ipython = types.SimpleNamespace(get_ipython=lambda: shell, display=display)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(FakeHandle, "calls", [])
    return FakeHandle.calls


def test_a_plain_process_is_no_notebook_and_is_shown_nothing():
    assert not is_notebook()
    with status_line("predicting") as say:
        say("1 of 2")


def test_one_output_is_updated(kernel):
    assert is_notebook()
    show = cell_output()
    for text in ("one", "one", "two"):
        show(f"<p>{text}</p>", text)
    assert kernel == [("display", "one"), ("update", "two")]


def test_a_connection_to_the_page_that_fails_ends_nothing(kernel, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("socket closed")

    monkeypatch.setattr(FakeHandle, "display", fail)
    show = cell_output()
    show("<p>one</p>", "one")
    monkeypatch.undo()
    show("<p>two</p>", "two")
    assert FakeHandle.calls[-1:] == [("display", "two")]


def test_a_status_line_ends_with_what_happened(kernel):
    def predict():
        with status_line("predicting") as say:
            say("1 of 2")
            say("2 of 2")
            raise InvalidInput("no such trial")

    with pytest.raises(InvalidInput):
        predict()
    assert [text.partition(",")[0] for _, text in kernel] == [
        "predicting: starting",
        "predicting: 1 of 2",
        "predicting: 2 of 2",
        "predicting: stopped",
    ]
