"""Activation offload moves saved tensors to the host and back, except parameters and small ones."""

import pytest
import torch
from torch import nn

from autotune.shipped import activation_offload as shipped
from autotune.shipped.activation_offload import offloaded, to_device, to_host
from autotune.spec.config import TrainingConfig
from autotune.techniques import find_unavailable


@pytest.fixture
def moved(monkeypatch):
    """Tensors copied to the host, from a few hundred bytes on so that small models have some."""
    seen = []
    monkeypatch.setattr(shipped, "SMALLEST_BYTES", 512)
    monkeypatch.setattr(
        shipped, "to_host", lambda tensor: (seen.append(tensor), to_host(tensor))[1]
    )
    return seen


@pytest.mark.parametrize("checkpointing", ["none", "selective", "block", "sqrt"])
def test_losses_are_bit_equal(checkpointing, moved, losses_of):
    plain = losses_of(checkpointing=checkpointing)
    assert not moved
    assert losses_of(checkpointing=checkpointing, activation_offload="cpu") == plain
    assert moved


def test_with_block_checkpointing_only_the_inputs_of_blocks_are_moved(moved, losses_of):
    losses_of(steps=1, checkpointing="block", activation_offload="cpu")
    checkpointed = len(moved)
    losses_of(steps=1, activation_offload="cpu")
    assert checkpointed < (len(moved) - checkpointed) / 4


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["block", "model"])
def test_offloading_works_with_compiled_code(scope, moved, losses_of):
    plain = losses_of(compile=scope)
    torch._dynamo.reset()
    assert losses_of(compile=scope, activation_offload="cpu") == pytest.approx(plain, rel=1e-6)
    assert moved


def test_parameters_and_their_views_are_not_moved(moved):
    model = nn.Linear(64, 64)
    with offloaded(model):
        loss = model(torch.randn(32, 64, requires_grad=True)).square().sum()
    loss.backward()
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert moved
    assert not storages & {tensor.untyped_storage().data_ptr() for tensor in moved}


def test_small_tensors_are_not_moved(moved):
    with offloaded(nn.Identity()):
        torch.randn(8, requires_grad=True).square().sum().backward()
    assert not moved


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(6, 5),
        lambda: torch.randn(6, 5).t(),
        lambda: torch.randn(4, 6, 5).permute(2, 0, 1),
        lambda: torch.randn(6, 15)[:, 5:10],
        lambda: torch.randn(6, 1).expand(6, 5),
        lambda: torch.zeros(0, 5),
    ],
    ids=["plain", "transposed", "permuted", "slice", "expanded", "empty"],
)
def test_a_tensor_is_unchanged_after_the_round_trip(make):
    tensor = make()
    back = to_device(to_host(tensor))
    assert torch.equal(back, tensor)
    assert back.data_ptr() != tensor.data_ptr() or not tensor.numel()
    assert back.stride() == tensor.stride() or 0 in tensor.stride()


def test_a_slice_takes_only_its_bytes_on_the_host():
    kept = to_host(torch.randn(6, 15)[:, 5:10])
    assert kept.copy.untyped_storage().nbytes() == 6 * 5 * 4


def test_offloading_is_unavailable_on_a_cpu():
    choices = {"activation_offload": ["none", "cpu"]}
    found = find_unavailable(choices, device=torch.device("cpu"))
    assert list(found["activation_offload"]) == ["cpu"]
    assert "host" in found["activation_offload"]["cpu"]
    assert find_unavailable(choices, device=torch.device("cuda")) == {}


@pytest.mark.slow
def test_a_prediction_for_a_gpu_does_not_count_offloaded_tensors():
    from autotune.predictor.predict import predict
    from autotune.spec.prediction import PredictionRequest
    from autotune.spec.workload import make_workload

    sizes = {"layers": 4, "width": 128, "heads": 2, "sequence_length": 512, "global_batch": 4}
    workload = make_workload("cpu", sizes)

    def activations(place):
        config = TrainingConfig(micro_batch_size=4, activation_offload=place, loss="chunked")
        found = predict(PredictionRequest(workload=workload, config=config, device="cuda"))
        return found.bytes_by_category["activations"]

    assert activations("cpu") < activations("none") / 4
