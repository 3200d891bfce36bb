"""A report's command for a trial, run by a shell: the same configuration, workload and peak."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import autotune
from autotune.reporting.report.commands import rerun_command
from autotune.spec.config import TrainingConfig
from tests.building.studies import definition


@pytest.mark.slow
def test_the_command_that_reruns_a_trial_measures_the_same_peak(
    make_trainer, workload, tmp_path, monkeypatch
):
    config = TrainingConfig(checkpointing="block", micro_batch_size=2, optimizer_fusion="foreach")
    measured = make_trainer(**config.to_dict()).run()
    command = rerun_command(
        definition("tiny", workload=workload, cap_bytes=2**30), number=7, config=config
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    ran = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    monkeypatch.chdir(tmp_path)
    again = autotune.show("tiny-trial-7")
    trial = next(record for record in again.trials if record.name == "trial 7")
    assert trial.config == config
    assert replace(again.workload, text_sha256="") == replace(workload, text_sha256="")
    assert trial.peak_memory_bytes == measured.peak_memory_bytes
