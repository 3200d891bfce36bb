"""Offload moves weights, gradients and optimizer state to the host and changes no result."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autotune.errors import IllegalConfiguration
from autotune.memory.host import HostMemoryExceeded
from autotune.predictor.predict import predict
from autotune.spec.config import LegalityContext, TrainingConfig, check_legal
from autotune.spec.prediction import PredictionRequest
from autotune.spec.workload import make_workload
from autotune.techniques import find_unavailable, offload, pinned_memory
from autotune.techniques.offload import SMALLEST_ELEMENTS
from autotune.techniques.optimizer_fusion import UpdateAfterBackward, UpdateRule, make_updater

ADAPTED = {"adapter": "lora", "precision": "bf16-mixed"}
SIZES = {"layers": 2, "width": 128, "heads": 2, "sequence_length": 64, "global_batch": 4}


@pytest.fixture
def _one_process_group():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    "choices", [{}, {"optimizer_fusion": "kernel", "micro_batch_size": 2, "checkpointing": "block"}]
)
@pytest.mark.usefixtures("_one_process_group")
def test_a_training_with_all_on_the_host_has_the_same_losses(choices, losses_of):
    plain = losses_of(steps=4)
    assert losses_of(steps=4, offload="all", **choices) == pytest.approx(plain, rel=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("_one_process_group")
def test_frozen_weights_of_four_bits_on_the_host_are_those_on_the_device(losses_of):
    plain = losses_of(steps=4, **ADAPTED, base_weights="nf4")
    moved = losses_of(steps=4, offload="all", **ADAPTED, base_weights="nf4")
    assert moved == pytest.approx(plain, rel=2e-3)


class Stream:
    """A stream of a device whose work is done at once."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait_stream(self, _other):
        pass

    def synchronize(self):
        pass

    def record_event(self):
        return self


@pytest.fixture
def _torchao_on_a_cpu(monkeypatch):
    """Lets torchao's optimizer run without a GPU: with no pinned memory and no streams."""
    pytest.importorskip("torchao.optim")
    module = sys.modules["torchao.optim.cpu_offload"]
    on_cpu = SimpleNamespace(**vars(torch))
    on_cpu.cuda = SimpleNamespace(
        Stream=Stream, current_stream=Stream, stream=lambda stream: stream
    )
    on_cpu.empty_like = lambda tensor, device=None, pin_memory=False: torch.empty_like(
        tensor, requires_grad=False
    )
    monkeypatch.setattr(module, "torch", on_cpu)
    monkeypatch.setattr(module, "get_available_devices", lambda: ["cpu", "cuda"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # Where torch is built for CUDA, its optimizers look at the current stream.
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)


@pytest.mark.parametrize("choices", [{"micro_batch_size": 2}, {"optimizer_fusion": "backward"}])
@pytest.mark.usefixtures("_torchao_on_a_cpu")
def test_a_training_with_its_state_on_the_host_has_the_same_losses(
    choices, losses_of, make_trainer, monkeypatch
):
    monkeypatch.setattr(offload, "SMALLEST_ELEMENTS", 64)  # below it are biases only
    plain = losses_of(steps=4)
    assert losses_of(steps=4, offload="optimizer", **choices) == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("fusion", ["none", "backward"])
@pytest.mark.usefixtures("_torchao_on_a_cpu")
def test_the_parity_check_sees_gradients_that_are_on_the_host(fusion, make_trainer, monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST_ELEMENTS", 64)

    def norms(**choices):
        trainer = make_trainer(**choices)
        trainer.parity._reads = True
        trainer.take_step(0, next(trainer.batches()))
        return trainer.parity.trace().gradient_norms

    plain = norms()
    assert norms(offload="optimizer", optimizer_fusion=fusion) == pytest.approx(plain, rel=1e-4)


@pytest.mark.usefixtures("_torchao_on_a_cpu")
def test_the_update_on_the_host_follows_the_learning_rate():
    weight = nn.Parameter(torch.zeros(SMALLEST_ELEMENTS))
    rule = UpdateRule(optimizer="sgd", fusion="none", learning_rate=1.0)
    updater = make_updater([weight], rule, optimizer=offload.StateOnHost([weight], rule))
    assert isinstance(updater, UpdateAfterBackward)
    updater.set_learning_rate(0.25)
    weight.sum().backward()
    updater.step()
    assert torch.equal(weight.detach(), torch.full_like(weight, -0.25))
    assert [state.numel() for state in updater.state()] == [SMALLEST_ELEMENTS]


@pytest.mark.parametrize("place", ["optimizer", "all"])
def test_offloading_is_unavailable_on_a_cpu(place):
    found = find_unavailable({"offload": ["none", place]}, device=torch.device("cpu"))
    assert list(found["offload"]) == [place]
    assert "in the host's memory already" in found["offload"][place]


def test_state_on_the_host_without_a_gpu_is_rejected_in_a_sentence(make_trainer):
    with pytest.raises(IllegalConfiguration, match="in the host's memory already"):
        make_trainer(offload="optimizer")


def predicted(device="cuda", **choices):
    config = TrainingConfig(**{"micro_batch_size": 4, **choices})
    workload = make_workload("cpu", SIZES)
    return predict(PredictionRequest(workload=workload, config=config, device=device))


@pytest.mark.slow
def test_a_prediction_for_a_gpu_counts_only_the_state_of_small_weights():
    plain, moved = predicted(), predicted(offload="optimizer")
    assert moved.bytes_by_category["parameters"] == plain.bytes_by_category["parameters"]
    state = moved.bytes_by_category["optimizer_state"]
    assert 0 < state < plain.bytes_by_category["optimizer_state"] / 50


@pytest.mark.slow
def test_a_prediction_for_a_gpu_counts_no_weights_and_state_that_are_on_the_host():
    sizes = predicted(offload="all").bytes_by_category
    assert sizes["parameters"] == sizes["optimizer_state"] == sizes["gradients"] == 0


@pytest.mark.slow
def test_a_prediction_for_a_gpu_counts_scales_there_of_weights_that_are_on_the_host():
    on_device = predicted(**ADAPTED, base_weights="nf4").bytes_by_category["parameters"]
    moved = predicted(offload="all", **ADAPTED, base_weights="nf4")
    assert 0 < moved.bytes_by_category["parameters"] < on_device / 4
    assert predicted(offload="all", **ADAPTED).bytes_by_category["parameters"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("place", ["optimizer", "all"])
def test_a_prediction_is_for_a_host_of_any_size_and_says_what_it_takes(place, monkeypatch):
    monkeypatch.setattr(pinned_memory, "available_bytes", lambda: 2**20)
    notes = predicted(offload=place).notes
    assert any(
        f"offload {place} takes" in note and "of the host's memory" in note for note in notes
    )


@pytest.mark.slow
def test_the_place_of_a_peak_has_the_name_of_the_models_own_class():
    workload = make_workload("cpu", {**SIZES, "width": 32})  # logits set the peak
    config = TrainingConfig(offload="all", micro_batch_size=4)
    found = predict(PredictionRequest(workload=workload, config=config, device="cpu"))
    assert found.module == "GPT"


def test_more_than_the_host_has_is_rejected_with_the_bytes_and_a_remedy(monkeypatch):
    monkeypatch.setattr(pinned_memory, "available_bytes", lambda: 10 * 2**20)
    weights = [nn.Parameter(torch.zeros(2**20, device="meta"))]
    # Weight and gradient of 4 MiB each, and two tensors of state.
    with pytest.raises(HostMemoryExceeded, match=r"takes 16\.00 MiB, and of the 10\.00 MiB"):
        pinned_memory.check_host_memory(TrainingConfig(offload="all"), weights)
    pinned_memory.check_host_memory(TrainingConfig(offload="none"), weights)


def test_frozen_weights_take_memory_of_the_host_without_gradient_and_state():
    frozen = nn.Parameter(torch.zeros(2**20, device="meta"), requires_grad=False)
    config = TrainingConfig(offload="all", **ADAPTED)
    assert pinned_memory.bytes_to_host(config, [frozen]) == 4 * 2**20


@pytest.mark.parametrize(
    ("choices", "at"),
    [
        ({"offload": "optimizer", "sharding": "ddp"}, {"devices": 2}),
        ({"offload": "all", "sharding": "zero1"}, {"devices": 2}),
        ({"offload": "optimizer"}, {"clips_gradients": True}),
        ({"offload": "optimizer", "precision": "fp16-mixed"}, {}),
        ({"offload": "all", "precision": "fp16-mixed"}, {}),
        ({"offload": "all", "precision": "bf16-stochastic"}, {}),
        ({"offload": "all", "optimizer": "adamw-8bit"}, {}),
        ({"offload": "optimizer", "optimizer": "paged-adamw"}, {}),
        ({"offload": "all", "optimizer": "adafactor"}, {}),
        ({"offload": "all", "optimizer_fusion": "backward", "micro_batch_size": 4}, {}),
        ({"offload": "all", **ADAPTED, "base_weights": "int8"}, {}),
    ],
)
def test_what_offloading_cannot_be_combined_with_is_illegal(choices, at):
    config = TrainingConfig(**{"micro_batch_size": 2, **choices})
    with pytest.raises(IllegalConfiguration, match="offload"):
        check_legal(config, LegalityContext(global_batch=4, **at))
