"""Scratch memory of CPU kernels, worked out, against the allocator's events of the real kernel."""

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from autotune.predictor.cpu import scratch_bytes

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
SHAPES = [
    *((2, 2, 32, 16), (4, 4, 128, 32), (1, 1, 100, 24), (2, 3, 200, 32)),
    *((1, 2, 600, 64), (1, 2, 768, 32), (3, 1, 131, 25)),
]
"""Batch, heads, sequence, size of a head: each way the kernel has of cutting a sequence, rests, and
odd numbers."""


def measured_scratch(operator, args) -> int:
    """Returns the peak during `operator`, without its results."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        results = operator(*args)
    events = recording.profiler.kineto_results.events()
    live = peak = 0
    for _, size_bytes in sorted(
        (e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"
    ):
        live += size_bytes
        peak = max(peak, live)
    return peak - sum(result.untyped_storage().nbytes() for result in results)


def draw(shape, dtype, *, heads_inside: bool) -> Tensor:
    """[batch, heads, sequence, size]; `heads_inside`: in the memory layout of a projection."""
    batch, heads, length, size = shape
    if heads_inside:
        return torch.randn(batch, length, heads, size, dtype=dtype).transpose(1, 2)
    return torch.randn(batch, heads, length, size, dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_buffers_of_flash_attention_are_known(shape, dtype):
    args = [*(draw(shape, dtype, heads_inside=True) for _ in range(3)), 0.0, True]
    assert scratch_bytes(FORWARD, args) == measured_scratch(FORWARD, args)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("heads_inside", [True, False])
def test_the_buffers_of_its_backward_and_the_copy_of_a_gradient_are_known(shape, heads_inside):
    query, key, value = (draw(shape, torch.float32, heads_inside=True) for _ in range(3))
    output, sums = FORWARD(query, key, value, 0.0, True)
    gradient = draw(shape, torch.float32, heads_inside=heads_inside)
    args = [gradient, query, key, value, output, sums, 0.0, True]
    assert scratch_bytes(BACKWARD, args) == measured_scratch(BACKWARD, args)


def test_an_operator_without_a_formula_has_no_scratch():
    assert scratch_bytes(torch.ops.aten.mm.default, [torch.zeros(2, 2), torch.zeros(2, 2)]) == 0
