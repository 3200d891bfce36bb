"""Experts run as one grouped product, which is predicted for every dtype.

The fake kernel of torch supports bfloat16 only.
"""

import json
import time

import pytest

from autotune.execution.server.prepared import prepare
from autotune.predictor.predict import PredictionRequest, predict
from autotune.spec.config import TrainingConfig
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import make_workload
from autotune.training.trainer import Trainer

MIXTRAL = {
    "model_type": "mixtral",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
SORTING_BYTES = 4096
"""Of the indices that distribute tokens over experts, which the fake form of one operator holds a
little longer."""


@pytest.fixture(scope="module")
def workload(tmp_path_factory):
    file = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(MIXTRAL))
    sizes = {
        "sequence_length": 32,
        "global_batch": 4,
        "steps": 7,
        "warmup_steps": 2,
        "evaluation_sequences": 4,
    }
    return make_workload("cpu", {"model": str(file), **sizes})


@pytest.fixture(scope="module")
def prepared(workload, tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "prepared"
    prepare(workload=workload.to_dict(), folder=str(folder))
    return folder


@pytest.mark.parametrize("checkpointing", ["none", "block"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_the_peak_of_a_mixture_of_experts_is_predicted(
    workload, prepared, precision, checkpointing
):
    config = TrainingConfig(precision=precision, checkpointing=checkpointing, micro_batch_size=4)
    request = TrainingRequest(
        workload=workload,
        config=config,
        folder=prepared,
        device="cpu",
        cap_bytes=2**40,
        requested_at=time.monotonic(),
    )
    measured = Trainer(request).run().peak_memory_bytes
    predicted = predict(
        PredictionRequest(workload=workload, config=config, device="cpu")
    ).peak_memory_bytes
    assert predicted == pytest.approx(measured, rel=0, abs=SORTING_BYTES)
