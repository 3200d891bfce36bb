"""A small study with real trainings from start to end, stopped, killed and resumed."""

import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

import autotune
from autotune.errors import InvalidDataset, InvalidInput, Stopped, StudyMismatch
from autotune.spec.config import TrainingConfig
from autotune.storage.store import StudyStore
from autotune.study.events import TrialBegan, TrialEnded
from autotune.study.opening.requested_space import beginning_line, space_of
from autotune.study.request import SearchRequest
from tests.building.commands import run_here

TRIALS = 9
SPACE = """
[techniques]
checkpointing = ["none", "block", "sqrt"]
optimizer_fusion = ["none", "kernel", "backward"]
micro_batch_size = "divisors"

[workload]
layers = 2
width = 32
heads = 2
sequence_length = 32
global_batch = 4
steps = 9
warmup_steps = 2
evaluation_sequences = 4

[[configurations]]
name = "checkpointed"
checkpointing = "block"
"""
CAP_BYTES = 900_000
STORAGE = "sqlite:///studies/autotune.db"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "autotune", *arguments]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, one_trial_server):
    """A folder with a finished study called `small`."""
    before = os.getcwd()
    folder = tmp_path_factory.mktemp("search")
    os.chdir(folder)
    Path("small.toml").write_text(SPACE)
    Path("tiny.toml").write_text(
        SPACE.replace('"divisors"', "[4]").replace(', "kernel", "backward"', "")
    )
    autotune.search(
        name="small",
        space="small.toml",
        max_mem=CAP_BYTES,
        trials=TRIALS,
        sampler="random",
        confirm=False,
    )
    yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def result(folder):
    return autotune.show("small")


def trials_wanted(study: str) -> int:
    store = StudyStore(STORAGE)
    try:
        return store.definition(study)[1]
    finally:
        store.close()


def attempt_states(study: str) -> Counter:
    """How the attempts of a study stand."""
    with closing(sqlite3.connect("studies/autotune.db")) as connection:
        rows = connection.execute(
            "SELECT state FROM autotune_attempts a JOIN autotune_trials t ON a.trial_id = t.id "
            "JOIN autotune_studies s ON t.study_id = s.id WHERE s.name = ?",
            (study,),
        )
        return Counter(state for (state,) in rows)


def test_a_study_has_as_many_distinct_configurations_as_trials_were_wanted(result):
    assert len({trial.config for trial in result.trials}) == TRIALS


def test_trial_numbers_are_consecutive(result):
    assert [trial.number for trial in result.trials] == list(range(TRIALS))


def test_the_baseline_comes_first_and_is_measured_beyond_the_cap(result):
    baseline = result.trials[0]
    assert (baseline.name, baseline.outcome, result.baseline) == ("baseline", "over_cap", 0)
    assert baseline.perplexity is not None


def test_named_configurations_come_before_suggestions(result):
    assert result.trials[1].name == "checkpointed"


def test_the_front_is_under_the_cap(result):
    assert result.front
    assert all(result.trial(number).device_bytes <= CAP_BYTES for number in result.front)


def test_the_pick_is_on_the_front_with_a_reason(result):
    assert result.pick.number in result.front
    assert "against the baseline" in result.pick.reason


def test_what_is_over_the_cap_is_predicted_to_be_and_not_trained(result):
    over = [trial for trial in result.trials[1:] if not trial.feasible]
    assert over
    assert {trial.outcome for trial in over} == {"predicted_over_cap"}
    assert all(
        trial.peak_memory_bytes is None and trial.predicted_peak_memory_bytes > CAP_BYTES
        for trial in over
    )


def test_configurations_of_one_numerics_class_end_at_one_perplexity(result):
    perplexities = [trial.perplexity for trial in result.trials if trial.perplexity is not None]
    assert max(perplexities) == pytest.approx(min(perplexities), rel=1e-4)


def test_every_trial_of_a_quiet_study_was_attempted_once(result):
    assert attempt_states("small") == {"finished": TRIALS}


def test_all_of_it_can_be_had_as_a_study_of_optunas(result):
    study = autotune.optuna_study("small")
    assert {trial.state.name for trial in study.trials} == {"COMPLETE"}
    assert {trial.user_attrs["autotune_number"] for trial in study.trials} == {
        t.number for t in result.trials
    }


def test_a_finished_study_is_answered_at_once(folder, result):
    events = []
    again = autotune.search(name="small", confirm=False, listener=events.append)
    assert not [event for event in events if isinstance(event, TrialBegan)]
    assert again.trials == result.trials


@pytest.mark.parametrize(
    "settings",
    [{"max_mem": "1GiB"}, {"sampler": "tpe"}, {"layers": 3}, {"seed": 5}, {"space": "quick"}],
    ids=lambda settings: next(iter(settings)),
)
def test_a_study_is_not_continued_with_other_settings(settings, folder, result):
    with pytest.raises(StudyMismatch, match="small"):
        autotune.search(name="small", **settings)


def test_show_prints_the_contract_as_one_json_object(folder, result):
    shown = run_here("show", "small", "--json", folder=folder)
    assert json.loads(shown.stdout) == json.loads(json.dumps(result.to_dict()))


def test_a_search_prints_nothing_but_json_when_asked_to(folder, result):
    found = run_here("search", "--name", "small", "--no-confirm", "--json", folder=folder)
    assert json.loads(found.stdout)["front"] == list(result.front)


@pytest.mark.slow
def test_an_exhausted_space_ends_the_study(folder):
    result = autotune.search(name="tiny", space="tiny.toml", trials=50, confirm=False)
    assert len(result.trials) == 3


@pytest.mark.slow
def test_grid_goes_through_the_space_in_its_order(folder):
    result = autotune.search(
        name="grid", space="tiny.toml", sampler="grid", trials=3, fresh=True, confirm=False
    )
    assert [trial.config.checkpointing for trial in result.trials] == ["none", "block", "sqrt"]


def test_nothing_feasible_is_exit_code_1_with_the_closest_miss(folder):
    nothing = run_here(
        "search",
        "--name",
        "none",
        "--space",
        "tiny.toml",
        "--max-mem",
        "100000",
        "--trials",
        "2",
        "--no-confirm",
        folder=folder,
    )
    assert nothing.returncode == 1
    assert "closest miss needs" in nothing.stdout


@pytest.mark.slow
def test_a_plain_script_without_a_main_guard_can_search(folder):
    settings = "name='plain', space='tiny.toml', trials=1, fresh=True, confirm=False"
    call = f"autotune.search({settings})"
    script = f"import autotune\nprint({call}.trials[0].outcome)\n"
    Path("plain.py").write_text(script)
    ran = subprocess.run([sys.executable, "plain.py"], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "ok"


def test_a_listener_sees_every_trial_begin_and_end(folder):
    events = []
    autotune.search(
        name="heard", space="tiny.toml", trials=2, fresh=True, confirm=False, listener=events.append
    )
    assert [type(event) for event in events if isinstance(event, TrialBegan | TrialEnded)] == [
        TrialBegan,
        TrialEnded,
    ] * 2


def test_a_missing_dataset_leaves_no_study_behind(folder):
    with pytest.raises(InvalidDataset, match=r"missing\.txt"):
        autotune.search(name="nodata", space="tiny.toml", dataset="missing.txt")
    assert "nodata" not in run_here("studies", folder=folder).stdout


def test_a_missing_device_is_rejected_by_name(folder):
    with pytest.raises(InvalidInput, match="cuda:77"):
        autotune.search(name="nodevice", space="tiny.toml", device="cuda:77")


def test_a_dry_run_says_what_would_be_done_and_leaves_no_study(folder):
    space = SPACE.replace("[techniques]", '[techniques]\nprecision = ["fp32", "tf32"]')
    Path("wider.toml").write_text(space)
    planned = run_here(
        "search", "--space", "wider.toml", "--dry-run", "--name", "planned", folder=folder
    )
    assert planned.returncode == 0
    assert "legal configurations" in planned.stdout
    assert "\nExcluded:\n  precision tf32: " in planned.stdout
    assert re.search(r"Time +about .* a trial of those studies", planned.stdout)
    # Which of the earlier studies depends on whose speeds were disturbed when they were measured.
    assert re.search(r"Reused +\d+ results?: \d+ of study \w+", planned.stdout)
    assert "planned" not in run_here("studies", folder=folder).stdout


def test_a_dry_run_does_not_describe_another_search_under_the_name_of_a_study(folder):
    with pytest.raises(InvalidInput, match="a dry run is of a new study, and there is a study"):
        autotune.dry_run(name="small", trials=12)


@pytest.mark.slow
def test_a_dry_run_from_python_returns_the_plan(folder):
    plan = autotune.dry_run(
        name="planned", space="tiny.toml", trials=2, fresh=True, seed=5, time_trials=True
    )
    assert (plan.trials_wanted, plan.definition.seed) == (2, 5)
    assert plan.seconds > 0
    whole = plan.seconds + plan.confirm_seconds + plan.variants_seconds
    assert plan.confirm_seconds == pytest.approx(plan.confirm_share * whole)
    assert plan.variants_seconds == pytest.approx(plan.variants_share * whole)
    for first in plan.to_dict()["first"]:
        predicted = plan.forecasts[TrainingConfig(**first["config"]).fingerprint].prediction
        assert first["predicted_peak_memory_bytes"] == predicted.peak_memory_bytes
    with pytest.raises(autotune.AutotuneError):
        autotune.show("planned")


@pytest.mark.slow
def test_a_dry_run_trains_nothing_unless_the_time_is_asked_for(folder):
    events = []
    plan = autotune.dry_run(space="tiny.toml", trials=2, fresh=True, listener=events.append)
    assert events
    assert not [event for event in events if "timing" in event.what]
    assert (plan.seconds, plan.seconds_by_precision) == (None, {})
    assert all(forecast.prediction for forecast in plan.forecasts.values())
    assert plan.forecasts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["--confirm-share", "0.05"],
            [
                r"Confirm   the finalists are measured again, in at most 5 % of .* \([0-9. ]+s\), ",
                r"without each of its techniques, in at most 15 % \([0-9. ]+s\); --no-confirm",
                r"trials begin for at most 8 m 00 s, which leaves 2 m 00 s of 10 m 00 s",
            ],
        ),
        (["--time-budget", "20m"], ["in at most 20 %", "trials begin for at most 13 m 00 s\n"]),
        (["--time-budget", "none"], ["in at most 20 %"]),
        (["--no-confirm"], ["Confirm   nothing", "trials begin for at most 10 m 00 s;"]),
    ],
    ids=["another share", "a time budget", "no limit", "no confirmation"],
)
def test_a_dry_run_announces_the_confirmation_and_its_share_of_the_time(given, said, folder):
    planned = run_here("search", "--space", "small.toml", "--dry-run", *given, folder=folder)
    for sentence in said:
        assert re.search(sentence, planned.stdout), planned.stdout
    assert ("none" in given) == ("no trial begins" not in planned.stdout)


def test_a_search_names_what_it_prepares_before_it_knows_the_device():
    request = SearchRequest(max_mem="8GiB", space="quick", workload={"model": "deep-one"})
    assert beginning_line(request, space_of(request)) == (
        "Preparing a search: deep-one, space quick, under 8.00 GiB, on a GPU or the CPU ..."
    )


def test_a_dry_run_from_python_can_be_stopped(folder):
    with pytest.raises(Stopped):
        autotune.dry_run(name="planned", space="tiny.toml", should_stop=lambda: True)


@pytest.mark.slow
def test_workers_run_no_more_trials_than_were_asked_for(folder):
    result = autotune.search(
        name="two",
        space="small.toml",
        trials=3,
        workers=2,
        until_converged=True,
        fresh=True,
        confirm=False,
    )
    assert len(result.trials) == 3
    assert trials_wanted("two") == 3


@pytest.mark.slow
def test_two_databases_with_studies_of_one_name_share_no_files(folder):
    Path("other.txt").write_text("Quite another text, again and again and again.\n" * 2000)
    first, second = (
        autotune.search(
            name="one",
            space="tiny.toml",
            trials=1,
            confirm=False,
            storage=f"sqlite:///{name}.db",
            dataset=dataset,
        )
        for name, dataset in (("a", "other.txt"), ("b", None))
    )
    assert first.workload.text_sha256 != second.workload.text_sha256
    assert first.trials[0].perplexity != second.trials[0].perplexity


@pytest.mark.slow
def test_a_study_begun_again_after_its_database_was_deleted_is_prepared_afresh(folder):
    for width in (32, 64):
        result = autotune.search(
            name="again",
            space="tiny.toml",
            trials=1,
            confirm=False,
            storage="sqlite:///deleted.db",
            width=width,
        )
        for file in Path().glob("deleted.db*"):
            file.unlink()
        assert result.trials[0].outcome == "ok"


def test_nothing_waits_in_the_work_folder_after_a_search(result):
    assert not list(Path("studies/work").rglob(".waiting-*"))


@pytest.mark.parametrize("cap", [0, -1, 8, 8e9, True])
def test_an_invalid_cap_is_rejected_from_python_too(cap, folder):
    with pytest.raises(InvalidInput, match="Invalid max_mem"):
        autotune.search(name="nocap", space="tiny.toml", max_mem=cap)


# -- stopped and killed ----------------------------------------------------------------------------


def processes_of_this_folder(folder: Path) -> list[int]:
    """Every live process that works in `folder`: searches, trial servers and trials."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            pid = int(link.parent.name)
            state = (link.parent / "stat").read_text().rpartition(")")[2].split()[0]
            if Path(os.readlink(link)) == folder and pid != os.getpid() and state != "Z":
                found.append(pid)
        except OSError:
            continue
    return found


def wait_until_gone(folder: Path) -> bool:
    end = time.monotonic() + 20
    while processes_of_this_folder(folder) and time.monotonic() < end:
        time.sleep(0.05)
    return not processes_of_this_folder(folder)


QUICK = {"PYTHONPATH": str(Path(__file__).parents[2]), "STAND_IN_SECONDS": "1"}
"""For searches whose trials are a stand-in, without torch."""


def quick_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.building.quick_search", *arguments]


def begin(name: str, *, trials: int, is_quick: bool = False) -> subprocess.Popen:
    # The default sampler would end the study once nothing that is left can fit.
    arguments = [
        "search",
        "--name",
        name,
        "--fresh",
        "--no-confirm",
        "--sampler",
        "random",
        "--space",
        "small.toml",
    ]
    arguments += ["--max-mem", "1GiB" if is_quick else str(CAP_BYTES)]
    return subprocess.Popen(
        (quick_command if is_quick else command)(*arguments, "--trials", str(trials)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(QUICK if is_quick else {})},
    )


def wait_for_trial(process: subprocess.Popen, trials: int) -> None:
    """Returns when the search has reported `trials` finished trials."""
    for line in process.stderr:
        if line.startswith(f"[{trials}/"):
            return


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "is_quick"), [(signal.SIGINT, 130, True), (signal.SIGTERM, 143, False)]
)
def test_a_signal_stops_the_search_and_prints_the_command_that_continues(
    number, code, is_quick, folder
):
    process = begin(f"signal-{code}", trials=TRIALS, is_quick=is_quick)
    wait_for_trial(process, 2)
    process.send_signal(number)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == code
    assert f"autotune search --name signal-{code}" in rest
    assert wait_until_gone(folder)
    assert "running" not in attempt_states(f"signal-{code}")


@pytest.mark.parametrize(
    ("kills", "is_quick"), [(1, True), pytest.param(3, False, marks=pytest.mark.slow)]
)
def test_a_search_killed_at_any_moment_loses_no_trial_and_doubles_none(kills, is_quick, folder):
    """And 500 times in studies/reliability/."""
    name, trials_wanted = f"killed-{kills}", 4 + 2 * kills
    process = begin(name, trials=trials_wanted, is_quick=is_quick)
    go_on = ("search", "--name", name, "--no-confirm", "--quiet")
    wait_for_trial(process, 1)
    finished_before = {}
    delays = random.Random(0)
    for _ in range(kills):
        time.sleep(delays.uniform(0.0, 1.5))
        assert process.poll() is None
        process.kill()
        process.communicate()
        assert wait_until_gone(folder)
        finished = {t.number: t for t in autotune.show(name).trials if t.is_finished}
        assert finished_before.items() <= finished.items()
        finished_before = finished
        process = subprocess.Popen(
            (quick_command if is_quick else command)(*go_on),
            stdout=subprocess.DEVNULL,
            env={**os.environ, **(QUICK if is_quick else {})},
        )
        while process.poll() is None and len(autotune.show(name).trials) <= len(finished):
            time.sleep(0.05)
    assert process.wait(timeout=300) == 0
    trials = autotune.show(name).trials
    assert len({trial.config for trial in trials}) == len(trials) == trials_wanted
    assert finished_before.items() <= {t.number: t for t in trials}.items()
    assert attempt_states(name)["finished"] == trials_wanted
    assert "running" not in attempt_states(name)
    assert wait_until_gone(folder)


@pytest.mark.slow
def test_a_second_search_of_a_running_study_joins_it(folder):
    first = begin("shared", trials=TRIALS, is_quick=True)
    wait_for_trial(first, 1)
    second = subprocess.run(
        quick_command("search", "--name", "shared", "--no-confirm", "--json"),
        capture_output=True,
        text=True,
        env={**os.environ, **QUICK},
    )
    first.communicate(timeout=120)
    assert (first.returncode, second.returncode) == (0, 0)
    trials = autotune.show("shared").trials
    assert json.loads(second.stdout)["study"] == "shared"
    assert [trial.number for trial in trials] == list(range(TRIALS))
    assert all(trial.is_finished for trial in trials)
    assert attempt_states("shared") == {"finished": TRIALS}


def test_an_allocation_history_is_rejected_without_a_cuda_allocator(folder):
    ended = run_here(
        "search",
        "--name",
        "history",
        "--space",
        "small.toml",
        "--device",
        "cpu",
        "--memory-snapshot",
        folder=folder,
    )
    assert (ended.returncode, "the device is cpu" in ended.stderr) == (2, True)
    assert "history" not in [summary.name for summary in StudyStore(STORAGE).studies()]
