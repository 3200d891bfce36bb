"""Host memory that offloading pins: counted as in torch, and limited to what the host has."""

import dataclasses
import time

import pytest
import torch

from autotune.execution.process.failures import measurement_of_exception
from autotune.memory.host import HostMemoryExceeded
from autotune.shipped import activation_offload
from autotune.spec.config import TrainingConfig
from autotune.spec.training_request import TrainingRequest
from autotune.techniques import pinned_memory
from autotune.techniques.activation_offload import pinned_bytes
from autotune.techniques.pinned_memory import PinnedMemoryBudget
from autotune.training.trainer import train
from tests.building.results import ON_CUDA_IN_THIS_PROCESS

MIB = 2**20


@pytest.fixture
def counted(monkeypatch):
    """Replaces torch's counters of pinned bytes and of those in use."""
    bytes_now = {"allocated_bytes.current": 0, "active_bytes.current": 0}
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: bytes_now)

    def set_to(pinned, *, in_use):
        bytes_now.update({"allocated_bytes.current": pinned, "active_bytes.current": in_use})

    return set_to


@pytest.mark.parametrize(
    ("size_bytes", "pinned"), [(0, 0), (1, 1), (4096, 4096), (4097, 8192), (3 * MIB, 4 * MIB)]
)
def test_torch_pins_the_next_power_of_two(size_bytes, pinned):
    assert pinned_bytes(size_bytes) == pinned


def test_real_pinned_bytes_are_not_counted_below_the_limit():
    budget = PinnedMemoryBudget(limit_bytes=8 * MIB, available_bytes=9 * MIB)
    budget.take(3 * MIB)
    budget.take(4 * MIB)


def test_reused_blocks_count_once(counted):
    budget = PinnedMemoryBudget(limit_bytes=8 * MIB, available_bytes=9 * MIB)
    counted(8 * MIB, in_use=4 * MIB)
    for _ in range(10):
        budget.take(4 * MIB)


def test_pinning_more_than_the_host_has_fails_with_the_bytes_and_a_remedy(counted):
    budget = PinnedMemoryBudget(limit_bytes=8 * MIB, available_bytes=9 * MIB)
    counted(8 * MIB, in_use=8 * MIB)
    budget.take(8 * MIB)
    with pytest.raises(HostMemoryExceeded) as ended:
        budget.take(1 * MIB)
    measurement = measurement_of_exception(ended.value, device_type="cuda")
    assert measurement.outcome == "out_of_memory"
    assert measurement.message.startswith(
        "out of host memory: offloaded activations pin at least 9.00 MiB"
    )
    assert (
        "of the 9.00 MiB that the host had left when the trial began 8.00 MiB may be pinned"
        in measurement.message
    )
    assert "use activation_offload none" in measurement.message


@pytest.fixture
def on_cuda(workload, prepared, monkeypatch):
    """on_cuda(available_bytes) trains with offloading on the first GPU, with that host memory."""
    monkeypatch.setattr(activation_offload, "SMALLEST_BYTES", 512)
    monkeypatch.setattr(
        activation_offload, "to_host", activation_offload.to_host
    )  # a trial replaces it

    def run(available_bytes):
        monkeypatch.setattr(pinned_memory, "available_bytes", lambda: available_bytes)
        config = TrainingConfig(micro_batch_size=workload.global_batch, activation_offload="cpu")
        return train(
            TrainingRequest(
                workload=dataclasses.replace(workload, steps=40),
                config=config,
                folder=prepared,
                **ON_CUDA_IN_THIS_PROCESS,
                cap_bytes=2**40,
                requested_at=time.monotonic(),
            )
        )

    return run


@pytest.mark.gpu
def test_pinned_memory_does_not_grow_with_each_step_and_is_reported(on_cuda):
    pinned = on_cuda(2**40).bytes_by_kind["pinned_on_host"]
    assert 0 < pinned < 64 * MIB
    assert on_cuda(int(pinned * 1.3)).outcome == "ok"


@pytest.mark.gpu
def test_a_trial_that_would_pin_more_than_the_host_has_ends_as_out_of_memory(on_cuda):
    with pytest.raises(HostMemoryExceeded, match="out of host memory"):
        on_cuda(64 * 2**10)
