"""A search that is given no end ends by a time budget, which its first lines say and can lift."""

import io
import math

import pytest
from rich.console import Console

import autotune
from autotune.analysis.pick import Preferences
from autotune.cli.live import LiveDisplay, PlainDisplay
from autotune.spec.study import MOST_TRIALS_IN_TIME, counted_trials
from autotune.study.event_text import opening_lines
from autotune.study.events import Notice, StudyOpened
from autotune.study.progress import Progress
from autotune.study.request import SearchRequest
from tests.building.studies import definition

SPACE = """
[techniques]
checkpointing = ["none", "block"]

[workload]
layers = 2
width = 32
heads = 2
sequence_length = 32
global_batch = 4
steps = 9
warmup_steps = 2
evaluation_sequences = 4
"""


@pytest.fixture(scope="module")
def searched(tmp_path_factory, one_trial_server):
    """Search a space of two configurations with these settings; return the events."""
    folder = tmp_path_factory.mktemp("default_end")
    space = folder / "two.toml"
    space.write_text(SPACE)

    def search(**settings):
        events = []
        autotune.search(
            space=str(space),
            storage=f"sqlite:///{folder}/autotune.db",
            max_mem="8GiB",
            confirm=False,
            listener=events.append,
            **settings,
        )
        (opened,) = (event for event in events if isinstance(event, StudyOpened))
        notes = [event.message for event in events if isinstance(event, Notice)]
        return opened.default_time_budget_seconds, notes

    return search


@pytest.mark.slow
def test_a_new_search_says_its_time_budget_and_that_its_cap_is_loose(searched):
    seconds, notes = searched(name="one")
    assert seconds == 600.0
    assert any("the cap of 8.00 GiB rules nothing out" in note for note in notes)


def test_a_search_that_confirms_its_finalists_keeps_a_part_of_its_time_for_them():
    assert SearchRequest(time_budget=600.0).seconds_for_trials == pytest.approx(390.0)
    shared = SearchRequest(time_budget=600.0, confirm_share=0.05)
    assert shared.seconds_for_trials == pytest.approx(480.0)
    alone = SearchRequest(time_budget=600.0, confirm=False)
    assert alone.seconds_for_trials == 600.0
    assert SearchRequest().seconds_for_trials is None


@pytest.mark.parametrize(
    ("options", "device_type", "trials"),
    [
        pytest.param({}, "cpu", 30, id="nothing, on a CPU"),
        pytest.param({}, "cuda", MOST_TRIALS_IN_TIME, id="nothing, on a GPU"),
        pytest.param({"time_budget": 60.0}, "cpu", MOST_TRIALS_IN_TIME, id="a time"),
        pytest.param({"time_budget": math.inf}, "cpu", 30, id="no limit of time"),
        pytest.param({"time_budget": 60.0, "trials": 7}, "cuda", 7, id="a time and trials"),
        pytest.param({"until_converged": True}, "cuda", 200, id="until it converges"),
    ],
)
def test_a_search_whose_time_is_limited_ends_by_it_and_not_by_a_number_of_trials(
    options, device_type, trials
):
    assert SearchRequest(**options).new_trials(device_type) == trials


def test_nobody_is_told_the_number_of_trials_of_a_search_that_ends_by_its_time():
    assert counted_trials(4, 30) == "4/30"
    assert counted_trials(4, 30, between=" of ") == "4 of 30"
    assert counted_trials(4, MOST_TRIALS_IN_TIME) == "4"


@pytest.mark.slow
def test_a_study_that_is_continued_by_its_name_has_no_default_time_budget(searched):
    assert searched(name="again", trials=1)[0] is None
    assert searched(name="again")[0] is None


@pytest.mark.parametrize("display", [LiveDisplay, PlainDisplay])
def test_a_display_says_when_the_search_ends_and_how_to_lift_it(display):
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=160)
    lines = opening_lines(
        definition("new"),
        is_new=True,
        excluded=(),
        default_time_budget_seconds=600.0,
        seconds_for_trials=390.0,
    )
    opened = StudyOpened(study="new", lines=tuple(lines), trials_wanted=30)
    with display(Progress(preferences=Preferences()), console) as shown:
        shown(opened)
    assert "trials begin for at most 6 m 30 s, which leaves 3 m 30 s of 10 m" in written.getvalue()
    assert "--time-budget none" in written.getvalue()
