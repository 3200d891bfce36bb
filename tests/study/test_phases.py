"""What a search does, and for how long, in every phase."""

import io
import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

import autotune
from autotune.analysis.pick import Preferences
from autotune.cli.live import LiveDisplay, PlainDisplay
from autotune.memory import nvml
from autotune.study.event_text import opening_lines
from autotune.study.events import (
    ConfirmationTime,
    Confirming,
    PlaceIsFree,
    Predicting,
    Preparing,
    StudyOpened,
    TrialBegan,
    TrialEnded,
    TrialPhase,
    WaitingForDevice,
)
from autotune.study.progress import Progress
from tests.building.results import record
from tests.building.studies import config, definition

SPACE = """
[techniques]
compile = ["none", "block"]

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


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def pass_by(seconds):
        now[0] += seconds

    return pass_by


@pytest.fixture
def progress(clock):
    return Progress(preferences=Preferences())


@pytest.fixture
def opened():
    return StudyOpened(study="new", trials_wanted=2)


def test_each_step_of_the_preparation_counts_from_its_own_begin(progress, clock):
    progress.note(Preparing(what="finding out what this device can do"))
    clock(12.0)
    assert progress.doing() == ["finding out what this device can do, 12.0 s"]
    progress.note(Preparing(what="reading the text"))
    clock(2.0)
    assert progress.doing() == ["reading the text, 2.0 s"]


def test_a_trial_and_its_phase_have_their_own_times(progress, clock, opened):
    progress.note(opened)
    progress.note(TrialBegan(number=3, config=config(0), name="baseline"))
    progress.note(TrialPhase(doing="compiling"))
    clock(30.0)
    progress.note(TrialPhase(doing="training"))
    clock(5.0)
    trial, phase = progress.doing()
    assert trial == f"#3 baseline: {config(0).describe()}, 35.0 s"
    assert phase == "training, 5.0 s"


def test_what_is_measured_again_stays_above_its_phases(progress, clock, opened):
    progress.note(opened)
    progress.note(Confirming(doing="the pick without precision"))
    clock(3.0)
    progress.note(TrialPhase(doing="training"))
    clock(2.0)
    assert progress.doing() == ["measuring the pick without precision, 5.0 s", "training, 2.0 s"]
    progress.note(TrialBegan(number=3, config=config(0), name=None))
    assert progress.doing() == [f"#3 {config(0).describe()}, 0.0 s"]


def test_a_trial_that_has_ended_leaves_no_phase(progress, opened):
    progress.note(opened)
    progress.note(TrialBegan(number=0, config=config(0), name=None))
    progress.note(TrialPhase(doing="evaluating"))
    progress.note(TrialEnded(record=record(0, config=config(0))))
    assert progress.doing() == []


def test_a_wait_for_the_device_says_for_whom_and_how_long(progress, clock, opened):
    progress.note(opened)
    progress.note(WaitingForDevice(device="cpu", holder="process 17 of user ada"))
    clock(61.0)
    (line,) = progress.doing()
    assert line.endswith("(process 17 of user ada), 1 m 01 s")


def test_the_time_left_is_that_of_the_trials_and_the_confirmation_follows(progress, clock, opened):
    progress.note(replace(opened, trials_wanted=3, confirm_share=0.2))
    clock(65.0)
    progress.note(TrialEnded(record=record(0, config=config(0), seconds=65.0)))
    # 2 trials of 65 s, and then 20 % and 15 % of a search of 3 * 65 s / 65 %.
    assert progress.time_left() == "about 2 m 10 s left, then up to 1 m 45 s of confirmation"


def test_a_time_budget_limits_the_trials_to_the_part_in_which_they_begin(progress, clock, opened):
    progress.note(replace(opened, trials_wanted=30, seconds_for_trials=390.0, confirm_share=0.2))
    clock(65.0)
    progress.note(TrialEnded(record=record(0, config=config(0), seconds=65.0)))
    assert progress.time_left() == "about 5 m 25 s left, then up to 3 m 30 s of confirmation"


def test_without_a_confirmation_none_is_announced(progress, clock, opened):
    progress.note(opened)
    clock(10.0)
    progress.note(TrialEnded(record=record(0, config=config(0), seconds=10.0)))
    assert progress.time_left() == "about 10.0 s left"


def test_during_a_confirmation_the_time_left_is_what_is_left_of_it(progress, clock, opened):
    progress.note(replace(opened, confirm_share=0.2))
    progress.note(ConfirmationTime(seconds=40.0))
    clock(15.0)
    measuring = Confirming(doing="#3 in turn with #0: the pick")
    progress.note(measuring)
    assert progress.status().endswith("at most 25.0 s left")
    (line,) = progress.lines(measuring)
    assert line.startswith("[15.0 s, at most 25.0 s left]  Measuring #3 in turn with #0")
    clock(26.0)
    assert progress.time_left() == "", "a measurement that has begun is not broken off"


def test_a_confirmation_without_a_limit_has_no_time_left(progress, opened):
    progress.note(opened)
    progress.note(ConfirmationTime(seconds=math.inf))
    assert progress.time_left() == ""


def test_the_live_table_shows_the_time_of_a_phase(opened):
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=160)
    progress = Progress(preferences=Preferences())
    with LiveDisplay(progress, console) as shown:
        shown(Preparing(what="reading the text"))
        time.sleep(0.6)
    assert "reading the text, 0." in written.getvalue()


def test_at_80_columns_the_time_left_is_a_line_of_its_own(progress, clock, opened):
    written = io.StringIO()
    shown = LiveDisplay(progress, Console(file=written, width=80))
    progress.note(replace(opened, trials_wanted=30, confirm_share=0.2))
    clock(600.0)
    progress.note(TrialEnded(record=record(0, config=config(0), seconds=600.0)))
    shown._live.console.print(shown._draw())
    left = "about 4 h 50 m left, then up to 2 h 41 m of confirmation"
    assert left in [line.strip() for line in written.getvalue().splitlines()]


def test_in_a_file_each_step_says_when_it_began_and_each_trial_how_long_it_took(
    progress, clock, opened
):
    written = io.StringIO()
    shown = PlainDisplay(progress, Console(file=written, width=160))
    clock(1.5)
    shown(Preparing(what="reading the text"))
    shown(opened)
    clock(80.0)
    shown(TrialBegan(number=0, config=config(0), name="baseline"))
    shown(TrialEnded(record=record(0, config=config(0), seconds=42.0)))
    preparing, *_, begun, ended = written.getvalue().splitlines()
    assert preparing == "[1.5 s]  Reading the text ..."
    assert begun == f"[1 m 22 s]  #0 baseline: {config(0).describe()} ..."
    assert ended.endswith(", in 42.0 s")


# -- several places --------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(opened):
    return replace(opened, places={"cuda:0": (), "cuda:1": ()})


def test_each_of_several_places_has_its_trial_and_its_phase(progress, clock, two_gpus):
    progress.note(two_gpus)
    progress.note(TrialBegan(number=0, config=config(0), name="baseline", device="cuda:0"))
    clock(10.0)
    progress.note(TrialBegan(number=1, config=config(1), name=None, device="cuda:1"))
    progress.note(TrialPhase(doing="compiling", device="cuda:0"))
    clock(5.0)
    first, second = progress.places()
    assert (first.name, first.trial.number, first.seconds, first.meanwhile) == (
        "cuda:0",
        0,
        15.0,
        "compiling",
    )
    assert (second.name, second.trial.number, second.seconds) == ("cuda:1", 1, 5.0)
    assert progress.doing() == []


def test_the_memory_at_a_place_is_that_of_its_gpu_on_which_most_is_in_use(
    progress, opened, monkeypatch
):
    used = {"GPU-0": 2**30, "GPU-1": 2**31}
    monkeypatch.setattr(
        nvml, "open_device", lambda uuid: SimpleNamespace(used_bytes=lambda: used[uuid])
    )
    progress.note(replace(opened, places={"cuda:0-1": tuple(used)}))
    written = io.StringIO()
    console = Console(file=written, width=160)
    console.print(LiveDisplay(progress, console)._draw())
    [line] = [line for line in written.getvalue().splitlines() if line.startswith("cuda:0-1")]
    assert line.rstrip().endswith("2.00 GiB in use")


def test_a_place_says_at_which_step_its_training_is_and_since_when_it_trains(
    progress, clock, two_gpus
):
    progress.note(two_gpus)
    progress.note(TrialBegan(number=0, config=config(0), name="baseline", device="cuda:0"))
    for ended in (11, 12):
        clock(3.0)
        progress.note(TrialPhase(doing="training", steps=(ended, 40), device="cuda:0"))
    clock(2.0)
    first, _ = progress.places()
    assert first.lines()[1] == "training, step 12 of 40, 5.0 s"


@pytest.mark.parametrize(
    "last",
    [
        Predicting(config=config(1), device="cuda:0"),
        Confirming(doing="the baseline again", device="cuda:0"),
        TrialPhase(doing="evaluating", device="cuda:0"),
        WaitingForDevice(device="cuda:0", place="cuda:0"),
    ],
)
def test_a_place_that_is_free_is_idle_whatever_it_did_last(progress, two_gpus, last):
    progress.note(two_gpus)
    progress.note(last)
    progress.note(PlaceIsFree(device="cuda:0"))
    first, _ = progress.places()
    assert (first.lines(), first.label, first.doing) == ([], "", "")


def test_places_are_idle_while_a_finalist_is_measured_in_turn(progress, two_gpus):
    progress.note(two_gpus)
    progress.note(TrialPhase(doing="evaluating", device="cuda:0"))
    progress.note(Confirming(doing="#3 in turn with #0: the pick"))
    assert [place.lines() for place in progress.places()] == [[], []]
    assert progress.doing() == ["measuring #3 in turn with #0: the pick, 0.0 s"]


def test_a_trial_that_has_ended_frees_its_place_alone(progress, two_gpus):
    progress.note(two_gpus)
    for number in (0, 1):
        progress.note(
            TrialBegan(number=number, config=config(number), name=None, device=f"cuda:{number}")
        )
    progress.note(TrialEnded(record=record(0, config=config(0))))
    assert [place.trial is None for place in progress.places()] == [True, False]


@pytest.mark.parametrize("width", [80, 200])
def test_the_live_table_has_a_row_for_each_place(two_gpus, width):
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=width)
    with LiveDisplay(Progress(preferences=Preferences()), console) as it:
        it(two_gpus)
        it(TrialBegan(number=7, config=config(0), name="baseline", device="cuda:1"))
        it(TrialPhase(doing="compiling", device="cuda:1"))
        it(WaitingForDevice(device="cuda:0", place="cuda:0"))
        it._live.refresh()
        it(PlaceIsFree(device="cuda:0"))
        it._live.refresh()
        it(Confirming(doing="the baseline again", device="cuda:0"))
        it._live.refresh()
    rows = [line.split() for line in written.getvalue().splitlines()]
    assert any(row[:2] == ["cuda:0", "idle"] for row in rows)
    assert any(row[:3] == ["cuda:0", "measuring", "the"] for row in rows)
    assert any(row[:3] == ["cuda:1", "#7", "baseline"] and "compiling" in row for row in rows)
    assert any(row[:1] == ["cuda:0"] and "waiting" in row for row in rows)


def test_in_a_file_a_trial_names_its_place(progress, two_gpus):
    written = io.StringIO()
    shown = PlainDisplay(progress, Console(file=written, width=160))
    lines = opening_lines(
        definition("new"), is_new=True, excluded=(), places=tuple(two_gpus.places)
    )
    shown(replace(two_gpus, lines=tuple(lines)))
    shown(TrialBegan(number=0, config=config(0), name="baseline", device="cuda:1"))
    _, devices, begun = written.getvalue().splitlines()
    assert devices == "Devices: cuda:0, cuda:1"
    assert begun.endswith(f"  cuda:1  #0 baseline: {config(0).describe()} ...")


@pytest.mark.slow  # it compiles for half a minute; the next one does not
def test_the_phases_of_real_trials_are_reported(tmp_path, one_trial_server):
    space = tmp_path / "compiled.toml"
    space.write_text(SPACE)
    phases = []

    def listen(event):
        if isinstance(event, TrialPhase):
            phases.append(event.doing)

    autotune.search(
        space=str(space),
        storage=f"sqlite:///{tmp_path}/autotune.db",
        name="phases",
        trials=2,
        confirm=False,
        listener=listen,
    )
    assert phases.count("starting") == 2
    assert {"training", "compiling"} <= set(phases)


@pytest.mark.slow
def test_the_steps_of_a_real_training_are_reported(tmp_path, one_trial_server):
    space = tmp_path / "long.toml"
    space.write_text(SPACE.replace("\nsteps = 9\n", "\nsteps = 200\n"))
    steps = []

    def listen(event):
        if isinstance(event, TrialPhase) and event.steps is not None:
            steps.append(event.steps)

    autotune.search(
        space=str(space),
        storage=f"sqlite:///{tmp_path}/autotune.db",
        name="steps",
        trials=1,
        confirm=False,
        predict=False,
        listener=listen,
    )
    assert steps == sorted(set(steps))
    assert {1 <= ended <= wanted == 200 for ended, wanted in steps} == {True}
