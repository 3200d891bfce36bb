"""Which GPU the commands predict for: that of the study, or a named one; neither is here."""

import sys

import pytest

import autotune
from autotune import cli
from autotune.execution.local import LocalExecutor
from autotune.spec.config import TrainingConfig
from autotune.spec.result import DeviceInfo
from autotune.spec.workload import make_workload
from autotune.study.explain.question import question_of_trial
from autotune.study.fit.fit import FitRequest, fit
from autotune.study.prediction.predictions import forecaster_of
from tests.building.studies import MIB, definition, keep, measured, open_store

SIZES = {"layers": 1, "width": 16, "heads": 2, "sequence_length": 16, "global_batch": 1}
H100 = DeviceInfo(
    device="cuda:0",
    name="an H100",
    total_memory_bytes=2**36,
    versions={"torch": "2.13.0"},
    compute_capability="9.0",
)
WORKSPACES_OF_AN_H100 = 2 * 32 * MIB
"""Bytes of cuBLAS's on 9.0: 32 MiB each for forward and backward. On 8.0 they are 8.125 MiB."""


pytestmark = pytest.mark.usefixtures("one_trial_server")


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    """A database with a study of one trial on an H100."""
    url = f"sqlite:///{tmp_path_factory.mktemp('studies')}/autotune.db"
    with open_store(url) as store:
        store.create_study(
            definition(workload=make_workload("cuda", SIZES), device=H100), trials_wanted=1
        )
        keep(store, TrainingConfig(), measured(peak_memory_bytes=65 * MIB))
    return url


def test_the_trial_of_a_study_is_predicted_for_the_gpu_of_the_study(storage, tmp_path):
    result = autotune.show("by-hand", storage=storage)
    with LocalExecutor(tmp_path) as executor:
        forecaster = forecaster_of(
            result, executor=executor, compute_capability=None, torch_version=None
        )
    assert (forecaster.device_type, forecaster.compute_capability) == ("cuda", "9.0")


@pytest.mark.slow
def test_the_trial_of_a_study_can_be_predicted_for_another_gpu_than_the_one_that_measured_it(
    storage, monkeypatch, capsys
):
    of_the_trial = ("--study", "by-hand", "--trial", "0", "--storage", storage)
    monkeypatch.setattr(
        sys, "argv", ["autotune", "predict", *of_the_trial, "--compute-capability", "8.0"]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    answer, errors = capsys.readouterr()
    assert ended.value.code == 0, errors
    assert "Note: for a GPU of compute capability 8.0." in answer
    assert "Measured 65.00 MiB on an H100, a different GPU from the one predicted for." in answer


def test_the_trial_of_a_study_is_explained_for_the_gpu_of_the_study(storage, tmp_path):
    with LocalExecutor(tmp_path) as executor:
        question = question_of_trial(executor, "by-hand", 0, storage=storage, torch_version=None)
    assert (question.forecaster.device_type, question.forecaster.compute_capability) == (
        "cuda",
        "9.0",
    )


def test_the_largest_model_is_found_for_a_gpu_that_is_named_and_not_trained_on_another():
    """No GPU has this compute capability; its major number has the workspace of an H100."""
    request = FitRequest(
        max_mem=2**30,
        vary="micro-batch",
        workload=SIZES,
        configuration={"checkpointing": "block"},
        compute_capability="12.9",
        torch_version="2.13",
    )
    result = fit(request)
    assert result.best.prediction.bytes_by_category["workspace"] == WORKSPACES_OF_AN_H100
    assert (result.device_type, result.compute_capability) == ("cuda", "12.9")
    assert result.not_confirmed.startswith(
        "there is no device cuda of compute capability 12.9 here"
    )
