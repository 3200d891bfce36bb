"""The reference study on a GPU: rows at the small scale, accuracy of the predictor, enforced cap.

Its command is tested on any machine, at a size that takes seconds.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import autotune
from autotune.spec.space_file import load_space

RUN = Path(__file__).parents[1] / "studies" / "peak_memory" / "run.py"
GIB = 1024**3


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The eleven rows at the small scale, each trained for a few steps, capped by the GPU only."""
    return autotune.search(
        space="peak_memory",
        scale="small",
        storage=f"sqlite:///{tmp_path_factory.mktemp('rows')}/results.db",
        dataset="python-docs",
        steps=16,
        warmup_steps=4,
        evaluation_sequences=8,
        confirm=False,
    )


@pytest.mark.gpu
@pytest.mark.slow
def test_the_rows_save_on_a_gpu_what_the_table_says(rows):
    reference = load_space("peak_memory").reference
    peaks = {record.name: record.peak_memory_bytes for record in rows.trials}
    for name, published in reference.rows.items():
        saved = 1 - peaks[name] / peaks["control"]
        expected = 1 - published.peak_memory_bytes / reference.rows["control"].peak_memory_bytes
        assert saved == pytest.approx(expected, abs=0.12), name


@pytest.mark.gpu
@pytest.mark.slow
def test_measured_peaks_of_the_rows_are_within_the_bounds_of_their_predictions(rows):
    for record in rows.trials:
        assert record.predicted_peak_memory_bytes == pytest.approx(
            record.peak_memory_bytes, rel=0.1
        ), record.name


@pytest.mark.gpu
@pytest.mark.slow
def test_what_needs_nine_gibibytes_fails_under_eight_on_a_card_that_has_more(tmp_path, monkeypatch):
    """Half the layers of the full size, with the step in backward; trained, not predicted."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.toml").write_text(
        '[defaults]\noptimizer = "adafactor-fixed-rate"\n[[configurations]]\nname = "fused"\n'
        'optimizer_fusion = "backward"\n'
    )
    settings = {
        "space": "one.toml",
        "model": "deep-one",
        "layers": 16,
        "width": 2048,
        "heads": 16,
        "sequence_length": 768,
        "global_batch": 4,
        "steps": 12,
        "evaluation_sequences": 4,
        "predict": False,
        "confirm": False,
    }
    needs = autotune.search(name="free", **settings).trials[1].peak_memory_bytes
    assert needs > 9 * GIB
    capped = autotune.search(name="capped", max_mem="8GiB", fresh=True, **settings)
    assert capped.trials[1].outcome == "out_of_memory"


@pytest.mark.slow
def test_the_command_of_the_study_stops_in_time_and_resumes(tmp_path):
    command = [
        sys.executable,
        str(RUN),
        "--scale",
        "tiny",
        "--dataset",
        "python-docs",
        "--minutes",
        "0.3",
    ]
    finished = []
    for _ in range(2):
        ended = subprocess.run(
            [*command, "--out", "out"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert ended.returncode == 75, ended.stderr
        trials = json.loads((tmp_path / "out" / "rows.json").read_text())["trials"]
        finished.append(
            {trial["number"]: trial["seconds"] for trial in trials if trial["outcome"] == "ok"}
        )
    first, second = finished
    assert len(second) > len(first) > 0
    assert second | first == second
    for name in ("rows.md", "beside.json", "environment.json"):
        assert (tmp_path / "out" / name).exists()


def test_where_no_time_is_left_nothing_is_begun(tmp_path):
    command = [
        sys.executable,
        str(RUN),
        "--scale",
        "tiny",
        "--minutes",
        "0",
        "--out",
        str(tmp_path / "out"),
    ]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (75, "")
