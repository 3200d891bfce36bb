"""What a running search says of the results that it took over."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from autotune.analysis.pick import Preferences
from autotune.cli.live import LiveDisplay, PlainDisplay
from autotune.study.event_text import opening_lines, reused_line
from autotune.study.events import StudyOpened
from autotune.study.progress import Progress
from tests.building.results import record, trial
from tests.building.studies import config, definition

BASELINE = config(0)
NEW = definition("new")


@pytest.mark.parametrize(
    ("display", "expected"),
    [(LiveDisplay, "from trial 3 of study 'x'"), (PlainDisplay, "1 of study x")],
)
def test_a_running_search_says_where_a_trial_was_measured(display, expected):
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=140)
    records = (record(0, config=BASELINE, reused_from=trial(3, "x")),)
    opened = StudyOpened(
        study=NEW.name,
        lines=tuple(opening_lines(NEW, is_new=True, excluded=(), reused={"x": 1})),
        trials_wanted=2,
        records=records,
    )
    with display(Progress(preferences=Preferences()), console) as shown:
        shown(opened)
    assert expected in written.getvalue()


def test_a_narrow_row_is_compared_with_the_baseline_and_not_with_the_first_reused_trial():
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80)
    other = replace(BASELINE, precision="bf16-true")
    opened = StudyOpened(
        study=NEW.name,
        baseline=NEW.baseline_config(),
        trials_wanted=2,
        records=(record(0, config=other, reused_from=trial(3, "x")),),
    )
    progress = Progress(preferences=Preferences())
    with LiveDisplay(progress, console) as shown:
        shown(opened)
    assert "as the baseline" not in written.getvalue()
    assert "0  bf16-true" in written.getvalue()


def test_many_studies_are_named_by_the_newest():
    line = reused_line({"e": 1, "d": 2, "c": 3, "b": 4, "a": 5})
    assert line == (
        "Reused    15 results: 1 of study e, 2 of study d, 3 of study c, 9 of older studies; "
        "--fresh measures them again"
    )
    assert reused_line({}) == ""
