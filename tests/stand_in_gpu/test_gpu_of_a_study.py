"""Predictions of a study are for its GPU.

Here it has compute capability 9.0, which has a larger cuBLAS workspace.
"""

import json

import pytest

from tests.stand_in_gpu.machine import SMALL_MODEL, Machine

PREDICTIONS = """
import json
from autotune.storage.store import StudyStore
forecasts = StudyStore("sqlite:///studies/autotune.db").forecasts("hopper")
print(json.dumps([forecast.prediction.to_dict() for forecast in forecasts.values()]))
"""
NOTE = "for a GPU of compute capability 9.0"
WORKSPACES = 2 * 32 * 1024**2
"""Bytes of one cuBLAS workspace each for forward and backward."""


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A machine that had a search with predictions and has another GPU now."""
    machine = Machine(tmp_path_factory.mktemp("machine"))
    space = machine.space("micro_batch_size = 2")
    machine.search(
        "--name", "hopper", "--space", space, "--trials", "2", "--max-mem", "2GiB", cc=90
    )
    return machine


def test_a_search_predicts_for_the_gpu_of_its_study(study):
    predictions = json.loads(study.python(PREDICTIONS))
    assert predictions
    for prediction in predictions:
        assert prediction["bytes_by_category"]["workspace"] >= WORKSPACES
        assert NOTE in prediction["notes"]


def test_the_trial_of_a_study_is_predicted_for_its_gpu_on_another_machine(study):
    answer = json.loads(
        study.autotune("predict", "--study", "hopper", "--trial", "1", "--json", cc=89).stdout
    )
    assert answer["bytes_by_category"]["workspace"] >= WORKSPACES
    assert NOTE in answer["notes"]


def test_fit_predicts_for_the_present_gpu_and_does_not_train_for_another(machine):
    model = (*SMALL_MODEL[:10], "--vary", "micro-batch", "--checkpointing", "block")
    fit = ("fit", "--max-mem", "2GiB", *model, "--json", "--quiet")
    here = json.loads(machine.autotune(*fit, "--no-trial", cc=90).stdout)
    assert here["compute_capability"] == "9.0"
    assert here["rows"][0]["bytes_by_category"]["workspace"] >= WORKSPACES
    elsewhere = json.loads(machine.autotune(*fit, "--compute-capability", "9.0", cc=89).stdout)
    assert elsewhere["rows"][0]["bytes_by_category"]["workspace"] >= WORKSPACES
    assert elsewhere["not_confirmed"].startswith(
        "there is no device cuda of compute capability 9.0 here"
    )
