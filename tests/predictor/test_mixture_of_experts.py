"""Experts run as one grouped product, which is predicted for every dtype.

The fake kernel of torch supports bfloat16 only.
"""

import json
import time

import pytest
from torch import nn

from autotune.execution.process.preparation import prepare
from autotune.execution.tasks import Prepare
from autotune.models import build_model
from autotune.predictor.predict import predict
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import PredictionRequest
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import make_workload
from autotune.training.trainer import Trainer
from autotune.units import format_percent

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
    prepare(Prepare(workload=workload, folder=folder))
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


def share_that_is_no_linear_layer(workload):
    """Counted in the network as transformers makes it: experts are one parameter."""
    network = build_model(workload).model.network
    layers = [one for one in network.model.layers.modules() if isinstance(one, nn.Linear)]
    numbers = sum(parameter.numel() for parameter in network.parameters())
    return 1 - sum(layer.weight.numel() for layer in layers) / numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    "base_weights",
    ["nf4", *(pytest.param(one, marks=pytest.mark.slow) for one in ("int8", "fp8"))],
)
def test_the_share_of_weights_that_stay_in_16_bits_is_predicted(workload, base_weights):
    config = TrainingConfig(
        precision="bf16-mixed", adapter="lora", base_weights=base_weights, micro_batch_size=4
    )
    prediction = predict(PredictionRequest(workload=workload, config=config, device="cpu"))
    expected = share_that_is_no_linear_layer(workload)
    assert prediction.unquantized_share == pytest.approx(expected)
    assert expected > 0.8
    percent = format_percent(expected)
    assert [note for note in prediction.notes if f"leaves {percent} % of the weights" in note]


@pytest.mark.slow
def test_a_trial_has_the_share_that_was_predicted(workload, prepared):
    config = TrainingConfig(
        precision="bf16-mixed", adapter="lora", base_weights="nf4", micro_batch_size=4
    )
    request = TrainingRequest(
        workload=workload,
        config=config,
        folder=prepared,
        device="cpu",
        cap_bytes=2**40,
        requested_at=time.monotonic(),
    )
    share = Trainer(request).run().unquantized_share
    assert share == pytest.approx(share_that_is_no_linear_layer(workload))
