"""The CPU meter against peaks known by hand."""

import pytest
import torch

from autotune.memory import resident_bytes
from autotune.memory.cpu import CpuMeter

MIB = 2**20


def floats(mebibytes: float) -> torch.Tensor:
    return torch.empty(int(mebibytes * MIB // 4))


def peak_of(block, resident=()) -> int:
    meter = CpuMeter()
    with meter.measuring(resident):
        block()
    return meter.reading().peak_memory_bytes


def test_the_peak_is_what_lives_at_once():
    def block():
        first = floats(8)
        second = floats(4)
        del first
        third = floats(6)
        del second, third

    assert peak_of(block) == 12 * MIB


def test_what_was_born_before_counts_when_it_is_named():
    before = floats(16)
    assert peak_of(lambda: floats(2), resident=[before]) == 18 * MIB


def test_memory_inside_one_operator_counts():
    x = floats(4)

    def block():
        torch.logsumexp(x.view(1024, -1), dim=1)  # makes a shifted copy inside

    assert peak_of(block, resident=[x]) > 4 * MIB + 4096


def test_compiled_code_is_seen():
    compiled = torch.compile(lambda x: (x.sin() @ x.cos()).sum(), dynamic=False)
    x = torch.randn(512, 512)
    compiled(x)  # compilation is not what is measured
    # sin, cos and their product of one MiB each; x itself was there before
    assert 3 * MIB <= peak_of(lambda: compiled(x)) <= 3 * MIB + 65536


def test_readings_accumulate_to_the_largest():
    meter = CpuMeter()
    for size in (3, 5, 2):
        with meter.measuring([]):
            floats(size)
    assert meter.reading().peak_memory_bytes == 5 * MIB


def test_the_peak_knows_its_phase():
    meter = CpuMeter()
    with meter.measuring([]):
        with meter.phase("forward"):
            floats(1)
        with meter.phase("backward"):
            floats(7)
        with meter.phase("step"):
            floats(2)
    assert meter.reading().peak_phase == "backward"


def test_views_of_one_storage_count_once():
    x = floats(4)
    assert resident_bytes([x, x[:10], x.view(2, -1)]) == 4 * MIB


def test_on_a_cpu_the_device_needs_the_peak_and_nothing_more():
    meter = CpuMeter()
    with meter.measuring([]):
        floats(3)
    assert meter.reading().device_bytes == 3 * MIB


def test_a_training_step_needs_what_arithmetic_says(make_trainer):
    trainer = make_trainer(optimizer_fusion="kernel")
    measurement = trainer.run()
    kinds = measurement.bytes_by_kind
    parameters = sum(p.numel() for p in trainer.training.parts.model.parameters())
    assert kinds["parameters"] == 4 * parameters
    assert kinds["optimizer_state"] == pytest.approx(8 * parameters, rel=0.01)
    # What stays, all gradients or all activations at once, and no more than both together.
    stays = sum(kinds.values())
    workload = trainer._workload
    activation_floats = workload.tokens_per_step * workload.layers * (34 * workload.width + 3 * 96)
    assert stays + 4 * parameters < measurement.peak_memory_bytes < stays + 4 * parameters + 4 * activation_floats


def test_the_peak_of_a_configuration_is_the_same_every_time(make_trainer):
    peaks = {make_trainer(checkpointing="block").run().peak_memory_bytes for _ in range(3)}
    assert len(peaks) == 1
