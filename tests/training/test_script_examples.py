"""The whole scripts of the manual train by themselves and as trials."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.execution.tasks import Train
from autotune.spec.config import TrainingConfig
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import make_workload

ROOT = Path(__file__).resolve().parents[2]
MANUAL = (ROOT / "docs" / "scripts.md").read_text(encoding="utf-8")
EXAMPLES = {
    library: code
    for code in re.findall(r"```python\n(.*?)```", MANUAL, re.DOTALL)
    for library in re.findall(r"^from (transformers|lightning|accelerate)\b", code, re.MULTILINE)
}
SOURCE_OF_PERPLEXITY = {
    "transformers": "evaluation loss after step 10",
    "lightning": "evaluation loss after step 10",
    "accelerate": "training loss of the last 2 steps",
}

pytestmark = pytest.mark.slow


def test_there_is_an_example_for_each_trainer():
    assert sorted(EXAMPLES) == sorted(SOURCE_OF_PERPLEXITY)


@pytest.mark.parametrize("library", sorted(SOURCE_OF_PERPLEXITY))
def test_an_example_is_measured_as_a_trial(library, server, tmp_path, monkeypatch):
    pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)  # trainers make a folder for their output
    script = tmp_path / "train.py"
    script.write_text(EXAMPLES[library], encoding="utf-8")
    workload = make_workload("cpu", {"script": str(script), "global_batch": 16, "steps": 10})
    training = TrainingRequest(
        workload=workload,
        config=TrainingConfig(micro_batch_size=4, checkpointing="block"),
        folder=tmp_path,
        device="cpu",
        cap_bytes=2**40,
    )
    future = server.submit(Train(training=training), log_file=tmp_path / "trial.log")
    measured = future.result(timeout=300).measurement
    assert (measured.outcome, measured.message) == ("ok", "")
    assert str(measured.perplexity_source) == SOURCE_OF_PERPLEXITY[library]


@pytest.mark.parametrize("library", sorted(SOURCE_OF_PERPLEXITY))
def test_an_example_trains_by_itself(library, tmp_path):
    pytest.importorskip(library)
    script = tmp_path / "train.py"
    script.write_text(EXAMPLES[library], encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("AUTOTUNE_CONFIG", None)
    ran = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
