"""A prediction is kept by all that it follows from, and answered without another process."""

import os
import platform
from dataclasses import replace
from importlib.metadata import version

import pytest

from autotune.errors import AutotuneError
from autotune.execution import kept_predictions
from autotune.execution.kept_predictions import read_prediction, write_prediction
from autotune.execution.local import LocalExecutor
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Prediction, PredictionRequest
from autotune.study.prediction.predictions import Forecaster

CONFIG = TrainingConfig(micro_batch_size=4)
PREDICTION = Prediction(
    device="cuda",
    fake_device="cpu",
    peak_memory_bytes=100,
    upper_bound_bytes=110,
    lower_bound_bytes=90,
    phase="backward",
    module="head",
    operator="aten.mm",
    bytes_by_category={"activations": 100},
    parameters=10,
    holders=(),
    notes=("an assumption",),
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The user's cache folder of each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def request_of(workload):
    def make(**changes):
        request = PredictionRequest(workload=workload, config=CONFIG, device="cuda")
        return replace(request, **changes)

    return make


def test_what_was_predicted_before_says_so_and_is_else_the_same(request_of):
    write_prediction(request_of(), PREDICTION)
    kept = read_prediction(request_of())
    assert replace(kept, notes=kept.notes[:-1]) == PREDICTION
    assert kept.notes[-1].startswith("predicted before, on 20")


@pytest.mark.parametrize(
    "change",
    [
        {"config": TrainingConfig(micro_batch_size=1)},
        {"device": "cpu"},
        {"compute_capability": "9.0"},
        {"torch_version": "2.8"},
        {"with_timeline": True},
        {"extrapolates": "any"},
    ],
    ids=str,
)
def test_another_question_is_not_answered_by_it(change, request_of):
    write_prediction(request_of(), PREDICTION)
    assert read_prediction(request_of(**change)) is None


def test_another_model_is_not_answered_by_it(request_of, workload):
    write_prediction(request_of(), PREDICTION)
    assert read_prediction(request_of(workload=replace(workload, layers=5))) is None


def test_a_variable_that_changes_what_torch_allocates_is_another_question(request_of, monkeypatch):
    write_prediction(request_of(), PREDICTION)
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    assert read_prediction(request_of()) is None


@pytest.mark.parametrize("library", ["torch", "triton", "bitsandbytes", "liger_kernel", "peft"])
def test_another_version_of_a_library_is_another_question(library, request_of, monkeypatch):
    write_prediction(request_of(), PREDICTION)
    monkeypatch.setattr(
        kept_predictions, "version", lambda name: "0" if name == library else version(name)
    )
    assert read_prediction(request_of()) is None


@pytest.mark.parametrize(
    ("change", "is_of_the_machine"),
    [
        ({}, False),
        ({"device": "cpu"}, True),
        ({"config": replace(CONFIG, compile="block")}, True),
        ({"config": replace(CONFIG, compile="model")}, True),
    ],
    ids=["eager on CUDA", "on a CPU", "a compiled block", "a compiled model"],
)
def test_what_runs_or_compiles_kernels_is_asked_of_each_machine(
    change, is_of_the_machine, request_of, monkeypatch
):
    write_prediction(request_of(**change), PREDICTION)
    assert read_prediction(request_of(**change)) is not None
    monkeypatch.setattr(platform, "node", lambda: "another")
    assert (read_prediction(request_of(**change)) is None) == is_of_the_machine


def test_a_system_that_binds_no_process_to_cpus_keeps_predictions(request_of, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    write_prediction(request_of(device="cpu"), PREDICTION)
    assert read_prediction(request_of(device="cpu")) is not None


def test_a_model_that_code_of_the_users_makes_is_not_kept(request_of, workload, cache):
    own = request_of(workload=replace(workload, model="my_models.py:make"))
    write_prediction(own, PREDICTION)
    assert read_prediction(own) is None
    assert not list(cache.rglob("*.json"))


@pytest.mark.parametrize(
    "content", ["", "\0", "[]", '{"key": 1, "kept": {}}', "[" * 10**5], ids=len
)
def test_a_damaged_file_is_as_none(content, request_of, cache):
    write_prediction(request_of(), PREDICTION)
    (file,) = cache.rglob("*.json")
    file.write_text(content)
    assert read_prediction(request_of()) is None


def test_a_file_with_another_answer_than_a_prediction_is_as_none(request_of, cache):
    write_prediction(request_of(), PREDICTION)
    (file,) = cache.rglob("*.json")
    file.write_text(file.read_text().replace('"phase": "backward"', '"phase": 3'))
    assert read_prediction(request_of()) is None


def test_others_cannot_read_what_is_kept(request_of, cache):
    write_prediction(request_of(), PREDICTION)
    (file,) = cache.rglob("*.json")
    assert file.parent.stat().st_mode & 0o077 == 0


def test_a_kept_prediction_needs_no_torch(request_of, workload, tmp_path):
    write_prediction(request_of(extrapolates="compiled"), PREDICTION)
    with LocalExecutor(tmp_path / "work", server_command=("false",)) as executor:
        forecaster = Forecaster(
            executor=executor, workload=workload, device_type="cuda", keeps=True
        )
        assert forecaster.predict(CONFIG).peak_memory_bytes == 100
        with pytest.raises(AutotuneError):
            replace(forecaster, keeps=False).predict(CONFIG)
