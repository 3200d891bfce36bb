"""`autotune profile`, the real command, on a study that was kept by hand or searched for."""

import json
import os

import pytest

from tests.building.commands import run_here
from tests.building.studies import measured, write_study


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a study of two trials, of which one was trained, on a device elsewhere."""
    folder = tmp_path_factory.mktemp("profile")
    (folder / "studies").mkdir()
    over_cap = measured(
        outcome="predicted_over_cap",
        peak_memory_bytes=None,
        device_bytes=None,
        tokens_per_second=None,
        tokens_per_second_spread=None,
        perplexity=None,
    )
    url = f"sqlite:///{folder}/studies/autotune.db"
    write_study(url, [measured(), over_cap], name="kept")
    return folder


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("kept", "1"), "trial 1 of study 'kept' cannot be profiled, because it never came to"),
        (("kept", "7"), "no trial 7"),
        (("kept", "0", "--steps", "0"), "Invalid --steps: 0"),
        (("kept", "0", "--compare"), "--compare needs two trials, and 1 are given"),
        (("kept", "0", "1", "--out", "x"), "--out is the folder of one trial"),
        (("nowhere",), "nowhere"),
    ],
)
def test_what_cannot_be_profiled_is_said_in_a_sentence(folder, arguments, sentence):
    ended = run_here("profile", *arguments, folder=folder)
    assert ended.returncode == 2
    assert sentence in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_study_of_another_device_is_rejected_by_the_names_of_both(folder):
    ended = run_here("profile", "kept", "0", folder=folder)
    assert ended.returncode == 2
    assert "was measured on device a CPU, here is" in ended.stderr


SEARCH = (
    *("search", "--name", "real", "--max-mem", "64MiB", "--trials", "2", "--no-confirm", "--quiet"),
    *("--device", "cpu", "--layers", "2", "--width", "32", "--heads", "2", "--seq-len", "32"),
    *("--global-batch", "4", "--steps", "10", "--space", "space.toml"),
)
SPACE = """
[techniques]
checkpointing = ["none", "block"]
"""


@pytest.mark.slow
def test_a_trial_is_profiled_and_compared_and_none_of_its_numbers_changes(tmp_path):
    (tmp_path / "space.toml").write_text(SPACE)
    assert run_here(*SEARCH, folder=tmp_path).returncode == 0
    before = run_here("show", "real", "--json", folder=tmp_path).stdout
    ended = run_here("profile", "real", "0", "--json", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (profile,) = json.loads(ended.stdout)["profiles"]
    trials = json.loads(before)["trials"]
    assert profile["peak_memory_bytes"] == trials[0]["peak_memory_bytes"]
    folder = tmp_path / profile["folder"]
    assert sorted(file.name for file in folder.iterdir()) == sorted(profile["files"])
    ended = run_here("profile", "real", "0", "1", "--compare", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "forward passes that run again" in ended.stdout
    assert (folder.parent / "profile-0-1.html").exists()
    assert run_here("show", "real", "--json", folder=tmp_path).stdout == before


@pytest.mark.slow
def test_a_trial_that_had_a_share_of_the_cpus_is_profiled_on_as_many(tmp_path):
    (tmp_path / "space.toml").write_text(SPACE)
    environment = {"OMP_NUM_THREADS": str(os.cpu_count())}
    search = (*SEARCH, "--devices", str(os.cpu_count()))
    assert run_here(*search, folder=tmp_path, **environment).returncode == 0
    ended = run_here("profile", "real", "0", "--json", folder=tmp_path, **environment)
    assert ended.returncode == 0, ended.stderr
