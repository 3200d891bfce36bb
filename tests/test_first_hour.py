"""`studies/gpu/run.py` without a GPU: what it runs and repeats, when it stops, what it archives."""

import contextlib
import io
import json
import os
import sqlite3
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest

from studies.gpu import archive, items, outcomes, processes, run
from studies.gpu.parts import by_hand, commands, predictions, techniques

ROOT = Path(__file__).parents[1]
STUDY = ROOT / "studies" / "gpu"
FIRST_FIVE = ["device", "tests", "techniques", "export", "predictions"]


@pytest.fixture
def run_items(tmp_path):
    """run_items({name: work}) runs a part of these items and returns the unfinished ones."""

    def run(works, *, seconds=100.0, now=None, least_seconds=10.0):
        made = [
            items.Item(name=name, work=work, least_seconds=least_seconds)
            for name, work in works.items()
        ]
        part = items.Part(
            name="part", minutes=1.0, about="", items=lambda _: made, summary=lambda _: []
        )
        settings = items.Settings(out=tmp_path, device="cpu")
        clock = items.Clock(seconds, **({} if now is None else {"now": now}))
        return items.run_part(part, settings=settings, clock=clock, say=lambda _: None)

    return run


@pytest.fixture
def kept(tmp_path):
    """kept("item") returns its result file."""
    return items.Kept(folder=tmp_path / "part" / "results").read


# -- parts -----------------------------------------------------------------------------------------


def test_the_first_five_parts_fit_into_half_an_hour():
    parts = run.PARTS
    assert [part.name for part in parts[:5]] == FIRST_FIVE
    assert sum(part.minutes for part in parts[:5]) <= 26.0  # the rest is for machines to start


def test_no_part_takes_more_than_nine_minutes():
    assert all(part.minutes <= 9.0 for part in run.PARTS)


def test_items_of_a_part_have_unique_names_that_are_valid_file_names(tmp_path):
    for part in run.PARTS:
        for rehearse in (False, True):
            settings = items.Settings(out=tmp_path, device="cuda:0", rehearse=rehearse)
            names = [item.name for item in part.items(settings)]
            assert len(names) == len(set(names)) > 0
            assert not any(set("/ ,:") & set(name) for name in names)


def test_the_list_says_what_is_done_and_runs_nothing(tmp_path):
    command = [sys.executable, str(STUDY / "run.py"), "--list", "--out", str(tmp_path / "out")]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [line.split()[1].rstrip(":") for line in listed.stdout.splitlines()][:5] == FIRST_FIVE
    assert not (tmp_path / "out").exists()


def test_an_unknown_part_is_rejected_with_the_names_of_all():
    ended = subprocess.run(
        [sys.executable, str(STUDY / "run.py"), "parity"], capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert "Invalid part: 'parity'" in ended.stderr
    assert "techniques" in ended.stderr


def test_the_space_has_every_value_of_every_technique():
    import tomllib

    from autotune.spec.config import OF_SEVERAL_DEVICES, SEARCHED, TrainingConfig

    content = tomllib.loads((STUDY / "spaces" / "every_technique.toml").read_text())
    for technique, values in SEARCHED.items():
        if technique in (*OF_SEVERAL_DEVICES, "engine"):
            continue  # the study is of one device
        default = getattr(TrainingConfig(), technique)
        named = {
            configuration.get(technique, default) for configuration in content["configurations"]
        }
        # The model of the study has no experts.
        assert named == {value for value in values if "experts" not in value}, technique


@pytest.mark.parametrize(
    "file", sorted((STUDY / "spaces").glob("*.toml")), ids=lambda file: file.stem
)
def test_every_space_is_valid_at_all_its_sizes(file):
    from autotune.spec.space_file import load_space

    space = load_space(str(file))
    for scale in space.scales:
        assert space.at_scale(scale).configurations


def test_every_target_of_export_is_run():
    from autotune.exporters import TARGETS

    assert tuple(TARGETS) == commands.TARGETS


# -- resuming --------------------------------------------------------------------------------------


def test_what_is_finished_is_not_run_again(run_items, kept):
    ran = []
    works = {
        name: lambda _, name=name: ran.append(name) or {"number": len(ran)} for name in ("a", "b")
    }
    run_items(works)
    assert run_items(works) == []
    assert ran == ["a", "b"]
    assert kept("b")["result"] == {"number": 2}


def test_an_interrupted_item_is_resumed_by_the_next_call(run_items, kept):
    calls = []

    def work(_):
        calls.append(1)
        if len(calls) == 1:
            raise items.TimeIsUp({"trials": 3})
        return {"trials": 7}

    assert run_items({"a": work}) == ["a"]
    assert (kept("a")["state"], kept("a")["result"]) == ("cut", {"trials": 3})
    assert run_items({"a": work}) == []
    assert (kept("a")["state"], kept("a")["result"]) == ("done", {"trials": 7})


def test_an_item_without_progress_fails_in_the_end(run_items, kept):
    def work(_):
        raise items.TimeIsUp({"trials": 3})

    for _ in range(items.MOST_CUTS):
        run_items({"a": work})
    assert kept("a")["state"] == "failed"
    assert "no further" in kept("a")["error"]


def test_half_a_result_file_counts_as_none(run_items, tmp_path):
    folder = tmp_path / "part" / "results"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text('{"state": "do')
    ran = []
    run_items({"a": lambda _: ran.append(1) or {}})
    assert ran == [1]


def test_a_failure_is_stored_with_its_last_lines_and_the_next_item_runs(run_items, kept):
    def work(_):
        raise RuntimeError("no kernel image is available")

    assert run_items({"a": work, "b": lambda _: {"done": 1}}) == []
    assert kept("a")["state"] == "failed"
    assert kept("a")["error"].endswith("RuntimeError: no kernel image is available")
    assert kept("b")["state"] == "done"


def test_a_part_that_cannot_list_its_items_is_a_failure_and_no_error(tmp_path, kept):
    def fail(_):
        raise OSError("no space file")

    part = items.Part(name="part", minutes=1.0, about="", items=fail, summary=lambda _: [])
    settings = items.Settings(out=tmp_path, device="cpu")
    clock = items.Clock(10.0)
    assert items.run_part(part, settings=settings, clock=clock, say=lambda _: None) == []
    assert "no space file" in kept("items")["error"]


def test_a_failure_is_run_again_on_request(run_items, kept, tmp_path):
    def work(_):
        raise RuntimeError

    run_items({"a": work})
    items.Kept(folder=tmp_path / "part" / "results").forget_failures()
    run_items({"a": lambda _: {"now": "works"}})
    assert kept("a")["result"] == {"now": "works"}


# -- time ------------------------------------------------------------------------------------------


def test_no_item_begins_that_has_too_little_time(run_items):
    times = iter([0.0, *[95.0] * 10])
    ran = []
    works = {name: lambda _, name=name: ran.append(name) or {} for name in ("a", "b")}
    assert run_items(works, seconds=100.0, now=lambda: next(times)) == ["a", "b"]
    assert ran == []


def test_a_command_is_ended_with_all_that_it_started_when_the_time_is_up(tmp_path):
    place = items.Place(
        settings=items.Settings(out=tmp_path, device="cpu"),
        folder=tmp_path,
        clock=items.Clock(1.0),
    )
    # A shell begins within milliseconds; what it starts in the background ignores SIGINT.
    program = ["sh", "-c", "sleep 60 & echo $!; wait"]
    ended = processes.run(program, place=place, log_name="sleeps", grace_seconds=0.1)
    assert ended.is_cut
    assert ends(int(ended.output))


def ends(pid: int, *, seconds: float = 10.0) -> bool:
    """Whether the process ends in this time: one that was killed takes a moment."""
    end = time.monotonic() + seconds
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
    return True


def test_results_of_another_machine_are_not_mixed(tmp_path, monkeypatch):
    machine = {
        "device": {"name": "GPU A", "why": ""},
        "versions": {"torch": "2.11.0", "python": "3.11.7"},
    }
    settings = items.Settings(out=tmp_path, device="cuda:0")
    monkeypatch.setattr(run, "program", lambda *_, **__: machine)
    run.check_machine(settings)
    run.check_machine(settings)
    machine["device"]["name"] = "GPU B"
    with pytest.raises(SystemExit, match="Choose another --out"):
        run.check_machine(settings)


# -- stored test results ---------------------------------------------------------------------------


def test_a_test_that_ends_the_process_fails_after_two_attempts(tmp_path):
    file = tmp_path / "tests.jsonl"
    begun = {"test": "t.py::one", "outcome": "begun"}
    file.write_text(json.dumps(begun) + "\n")
    assert outcomes.finished(file) == {}
    file.write_text(2 * (json.dumps(begun) + "\n") + '{"test": "t.p')
    assert outcomes.finished(file)["t.py::one"]["outcome"] == "lost"


@pytest.mark.slow
def test_a_second_run_of_the_tests_runs_what_is_left(tmp_path):
    (tmp_path / "test_some.py").write_text("def test_a(): pass\ndef test_b(): assert 0\n")
    kept = tmp_path / "kept.jsonl"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "studies.gpu.programs.kept_tests",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        ".",
    ]

    def run(until):
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        variables |= {"KEPT_TESTS_FILE": str(kept), "KEPT_TESTS_UNTIL": until}
        subprocess.run([*command, "test_some.py"], cwd=tmp_path, env=variables, capture_output=True)
        return (
            [json.loads(line)["outcome"] for line in kept.read_text().splitlines()]
            if kept.exists()
            else []
        )

    assert run("0") == []
    assert run("9e9") == ["begun", "passed", "begun", "failed"]
    assert len(run("9e9")) == 4


# -- the archive -----------------------------------------------------------------------------------


def names_in(file):
    with tarfile.open(file) as packed:
        return set(packed.getnames())


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "out"
    (folder / "part" / "results").mkdir(parents=True)
    (folder / "part" / "results" / "a.json").write_text("{}")
    (folder / "part" / "a.log").write_text("first\n" + 100_000 * "x" + "last")
    (folder / "predictions").mkdir()  # a part, and within a study the name of a cache
    (folder / "predictions" / "b.json").write_text("{}")
    for left_out in ("prepared", "predictions"):
        (folder / "work" / left_out).mkdir(parents=True)
        (folder / "work" / left_out / "text.json").write_text("{}")
    (folder / "work" / "prepared" / "weights.pt").write_bytes(b"w")
    with sqlite3.connect(folder / "results.db") as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE trials (number)")
        database.execute("INSERT INTO trials VALUES (7)")
    return folder


def test_the_archive_has_results_databases_and_the_ends_of_logs(out, tmp_path):
    file = tmp_path / "out.tar.gz"
    assert archive.write_archive(out, file) == []
    expected = {"part/results/a.json", "part/a.log", "predictions/b.json", "results.db"}
    assert names_in(file) == expected
    archive.unpack_archive(file, tmp_path / "again")
    log = (tmp_path / "again" / "part" / "a.log").read_text()
    assert log.endswith("last")
    assert len(log) == archive.LOG_BYTES
    with sqlite3.connect(tmp_path / "again" / "results.db") as database:
        assert database.execute("SELECT number FROM trials").fetchall() == [(7,)]


def test_an_archive_that_would_be_too_large_omits_the_largest_file_and_names_it(out, tmp_path):
    file = tmp_path / "out.tar.gz"
    (out / "large.json").write_bytes(os.urandom(300_000))
    most_bytes = 100_000
    assert archive.write_archive(out, file, most_bytes=most_bytes) == ["large.json"]
    assert file.stat().st_size <= most_bytes
    with tarfile.open(file) as packed:
        assert io.TextIOWrapper(packed.extractfile("LEFT_OUT.txt")).read() == "large.json"


def test_the_archive_is_at_most_what_a_device_machine_hands_back():
    assert archive.MOST_BYTES == 16 * 1024**2


# -- summaries -------------------------------------------------------------------------------------


def test_a_summary_says_what_failed_and_what_is_missing(run_items, tmp_path):
    def failing(_):
        raise RuntimeError("an illegal memory access")

    def missing(_):
        raise items.Missing("needs torchao")

    run_items({"a": failing, "b": missing})
    part = items.Part(
        name="part", minutes=1.0, about="", items=lambda _: [], summary=lambda _: ["all of it"]
    )
    text = "\n".join(run.summary(part, tmp_path))
    assert "all of it" in text
    assert "a: FAILED" in text
    assert "an illegal memory access" in text
    assert "b: not here: needs torchao" in text


def test_predictions_are_compared_with_the_trials_of_the_same_configuration():
    config, other = (
        {"precision": "fp32", "compile": "none"},
        {"precision": "bf16-mixed", "compile": "block"},
    )
    trial = {"name": "plain", "outcome": "ok", "peak_phase": "backward", "message": ""}
    results = {
        "measured-114m": {
            "trials": [
                {**trial, "config": config, "peak_memory_bytes": 100 * 2**20},
                {**trial, "config": other, "peak_memory_bytes": 80 * 2**20, "name": "compiled"},
            ]
        },
        "predicted-114m": {
            "predictions": [
                {
                    "name": "plain",
                    "config": dict(reversed(config.items())),
                    "peak_memory_bytes": 98 * 2**20,
                    "refusal": "",
                },
                {
                    "name": "compiled",
                    "config": other,
                    "peak_memory_bytes": None,
                    "refusal": "no fake kernel",
                },
            ]
        },
    }
    lines = list(predictions.summary(results))
    assert lines == [
        "114m, eager 32 bit: 1 pairs, predicted / measured 0.9800 to 0.9800, "
        "median 0.9800, at most 2.0 MiB apart",
        "114m | plain | predicted 98.0 MiB | measured 100.0 MiB in backward | 0.9800 | -2.0 MiB",
        "114m | compiled | not predicted: no fake kernel",
    ]


def test_a_loop_that_is_faster_than_its_trial_is_pointed_out():
    pair = {
        "trial": {"name": "bf16", "tokens_per_second": 98.0, "peak_memory_bytes": 10},
        "by_hand": {"tokens_per_second": {"events": 100.0}, "peak_memory_bytes": 7},
    }
    results = {"short-1": {"tokens_per_step": 49, "compared": [pair]}}
    assert list(by_hand.summary(results)) == [
        "short, bf16, steps of 500.0 ms: trial / events 0.980 (0.980), BELOW 0.99",
        "short, bf16: peak of the trial +3 bytes more",
    ]


def test_the_largest_differences_of_all_seeds_are_what_tolerances_must_allow():
    def seed(loss, gradient):
        plain = {"what": "plain, against fp32", "loss": 1e-3, "gradient": 1e-2, "losses": []}
        return {
            "pairs": [
                plain,
                {"what": "fp8, compile block", "loss": loss, "gradient": gradient, "losses": []},
            ]
        }

    results = {
        "first-steps-fp8-seed-0": seed(1e-4, 3e-2),
        "first-steps-fp8-seed-1": seed(5e-4, 2e-2),
    }
    lines = list(techniques.summary(results))
    assert (
        "fp8, 2 seeds, 2 comparisons: loss 5.0e-04 (fp8, compile block), gradient 3.0e-02"
        in lines[0]
    )
    assert "fp8 plain against fp32: loss 1.0e-03" in lines[1]
