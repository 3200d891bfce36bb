"""Profiles of real trainings on a CPU."""

import dataclasses
import gzip
import json

import pytest

from autotune.spec.config import TrainingConfig
from autotune.spec.profile import Profile
from autotune.spec.reading import parse
from autotune.spec.training_request import TrainingRequest
from autotune.training.profiling import profile_training

STEPS = 2


def profiled(workload, prepared, folder, **choices):
    folder.mkdir()
    config = TrainingConfig(micro_batch_size=workload.global_batch, **choices)
    request = TrainingRequest(
        workload=workload,
        config=config,
        folder=prepared,
        device="cpu",
        cap_bytes=2**40,
        enforce_cap=False,
        requested_at=0.0,
    )
    return profile_training(request, folder=folder, steps=STEPS)


def predicted(workload, **choices):
    from autotune.predictor.predict import predict
    from autotune.spec.prediction import PredictionRequest

    config = TrainingConfig(micro_batch_size=workload.global_batch, **choices)
    return predict(PredictionRequest(workload=workload, config=config, device="cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def checkpointed(workload, prepared, folder) -> Profile:
    return profiled(workload, prepared, folder / "checkpointed", checkpointing="block")


@pytest.mark.slow
def test_a_profiled_step_holds_what_is_predicted_by_kind(workload, checkpointed):
    prediction = predicted(workload, checkpointing="block")
    assert checkpointed.peak_memory_bytes == prediction.peak_memory_bytes
    assert dict(checkpointed.bytes_by_category) == dict(prediction.bytes_by_category)
    assert checkpointed.peak_phase == prediction.phase


def test_the_parts_of_a_step_are_within_it(checkpointed):
    phases = checkpointed.phase_seconds
    assert list(phases) == ["forward", "backward", "step"]
    assert 0.8 * checkpointed.profiled_step_seconds < sum(phases.values())
    assert sum(phases.values()) <= checkpointed.profiled_step_seconds
    assert checkpointed.recomputed_seconds is not None
    assert 0 < checkpointed.recomputed_seconds < phases["backward"]
    own = sum(one.host_seconds for one in checkpointed.operators)
    assert own <= checkpointed.profiled_step_seconds


def test_operators_are_counted_by_step_and_allocate_what_they_return(workload, checkpointed):
    by_name = {one.name: one for one in checkpointed.operators}
    rows = workload.global_batch * workload.sequence_length
    loss = by_name["aten::_log_softmax"]
    assert loss.calls == 1
    assert loss.allocated_bytes == rows * workload.vocab_size * 4


def test_the_trace_has_every_profiled_step(folder, checkpointed):
    assert checkpointed.files == ("trace.json.gz",)
    trace = json.loads(gzip.decompress((folder / "checkpointed" / "trace.json.gz").read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"] if event.get("ph") == "X"]
    assert names.count("autotune::whole step") == STEPS


@pytest.mark.slow
def test_without_checkpointing_nothing_runs_again(workload, prepared, folder):
    plain = profiled(workload, prepared, folder / "plain")
    assert plain.recomputed_seconds == 0.0
    assert plain.peak_memory_bytes == predicted(workload).peak_memory_bytes


def test_a_profile_survives_json(checkpointed):
    assert parse(Profile, json.loads(json.dumps(checkpointed.to_dict()))) == checkpointed


@pytest.mark.slow
def test_compiled_code_is_written_and_its_graphs_are_counted(workload, prepared, folder):
    found = profiled(
        dataclasses.replace(workload, layers=2), prepared, folder / "compiled", compile="block"
    )
    assert found.compilation is not None
    (graph,) = found.compilation.graphs
    assert graph.operators > 10
    assert found.compilation.breaks == ()
    assert found.compilation.code_files
    for file in found.compilation.code_files:
        assert "def call(" in (folder / "compiled" / file).read_text()
