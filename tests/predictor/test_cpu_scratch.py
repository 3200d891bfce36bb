"""Scratch memory of CPU kernels, worked out, against the allocator's events of the real kernel."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from autotune.predictor.cpu import CpuKernels

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
SHAPES = [
    *((2, 2, 32, 16), (4, 4, 128, 32), (1, 1, 100, 24), (2, 3, 200, 32)),
    *((1, 2, 600, 64), (1, 2, 768, 32), (3, 1, 131, 25)),
]
"""Batch, heads, sequence, size of a head: each way the kernel has of cutting a sequence, rests, and
odd numbers."""


def measured_scratch(operator, args) -> int:
    """Returns the peak during `operator`, without results in memory of their own."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        results = operator(*args)
    events = recording.profiler.kineto_results.events()
    live = peak = 0
    for _, size_bytes in sorted(
        (e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"
    ):
        live += size_bytes
        peak = max(peak, live)
    if isinstance(results, Tensor):
        results = (results,)
    given = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, Tensor)}
    storages = [result.untyped_storage() for result in results]
    return peak - sum(one.nbytes() for one in storages if one._cdata not in given)


def predicted_scratch(operator, args) -> int:
    return CpuKernels().scratch_bytes(operator, args, operator(*args), {})


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
    assert predicted_scratch(FORWARD, args) == measured_scratch(FORWARD, args)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("heads_inside", [True, False])
def test_the_buffers_of_its_backward_and_the_copy_of_a_gradient_are_known(shape, heads_inside):
    query, key, value = (draw(shape, torch.float32, heads_inside=True) for _ in range(3))
    output, sums = FORWARD(query, key, value, 0.0, True)
    gradient = draw(shape, torch.float32, heads_inside=heads_inside)
    args = [gradient, query, key, value, output, sums, 0.0, True]
    assert predicted_scratch(BACKWARD, args) == measured_scratch(BACKWARD, args)


A_NUMBER = 16
"""Bytes of a plain number, which a kernel gets as a tensor and may convert."""
WIDE, NARROW = torch.ones(64, 48), torch.ones(64, 48, dtype=torch.bfloat16)
WHOLE = torch.ones(64, 48, dtype=torch.int64)
COLUMN, ROW = torch.ones(64, 1), torch.ones(48, dtype=torch.bfloat16)
NUMBER, MASK = torch.tensor(2.0), torch.ones(64, 48, dtype=torch.bool)
ELEMENTWISE = {
    "a scale in another format": (aten.mul.Tensor, [NARROW, COLUMN]),
    "a row in another format": (aten.add.Tensor, [WIDE, ROW]),
    "one format": (aten.add.Tensor, [NARROW, NARROW]),
    "a tensor of one number": (aten.mul.Tensor, [NARROW, NUMBER]),
    "a plain number": (aten.mul.Tensor, [NARROW, 2.0]),
    "into a narrower tensor": (aten.mul_.Tensor, [NARROW.clone(), COLUMN]),
    "into a wider tensor": (aten.add_.Tensor, [WIDE.clone(), NARROW]),
    "a comparison": (aten.eq.Tensor, [NARROW, WIDE]),
    "a choice between formats": (aten.where.self, [MASK, NARROW, WIDE]),
    "a mask": (aten.masked_fill.Scalar, [NARROW, MASK, 0.0]),
    "a quotient of whole numbers": (aten.div.Tensor, [WHOLE, WHOLE]),
    "whole numbers times a fraction": (aten.mul.Tensor, [WHOLE, 0.5]),
    "a root of whole numbers": (aten.sqrt.default, [WHOLE]),
    "three tensors": (aten.addcmul.default, [WIDE, NARROW, NARROW]),
}
INDEXED = {
    "chosen by a mask": (aten.index.Tensor, [WIDE, [MASK]]),
    "rows chosen by a mask": (aten.index.Tensor, [WIDE, [MASK[:, 0]]]),
    "one number where a mask is": (aten.index_put_.default, [WIDE.clone(), [MASK], NUMBER]),
    "numbers where a mask is": (aten.index_put_.default, [WIDE.clone(), [MASK], WIDE.view(-1)]),
}
REDUCTIONS = {
    "a mean of 16-bit numbers": (aten.mean.dim, [NARROW, [1]]),
    "a mean": (aten.mean.dim, [WIDE, [1]]),
    "a sum of 16-bit numbers": (aten.sum.dim_IntList, [NARROW, [1]]),
    "a sum of booleans": (aten.sum.dim_IntList, [MASK, [1]]),
    "a norm of 16-bit numbers": (aten.linalg_vector_norm.default, [NARROW, 2, [1]]),
}


@pytest.mark.parametrize("case", ELEMENTWISE)
def test_what_an_elementwise_kernel_converts_is_known(case):
    operator, args = ELEMENTWISE[case]
    error_bytes = predicted_scratch(operator, args) - measured_scratch(operator, args)
    assert abs(error_bytes) <= A_NUMBER


@pytest.mark.parametrize("case", INDEXED)
def test_the_indices_that_a_mask_stands_for_are_known(case):
    operator, args = INDEXED[case]
    error_bytes = predicted_scratch(operator, args) - measured_scratch(operator, args)
    assert abs(error_bytes) <= A_NUMBER


@pytest.mark.parametrize("case", REDUCTIONS)
def test_what_a_sum_converts_is_known(case):
    operator, args = REDUCTIONS[case]
    error_bytes = predicted_scratch(operator, args) - measured_scratch(operator, args)
    assert abs(error_bytes) <= A_NUMBER


def transposed(rows, columns) -> Tensor:
    return torch.ones(columns, rows, dtype=torch.bfloat16).t()


PRODUCTS = {
    "narrow": (aten.mm.default, [torch.ones(64, 48, dtype=torch.bfloat16), transposed(48, 8)]),
    "of a transposed matrix": (aten.mm.default, [transposed(48, 64), NARROW]),
    "with a bias": (aten.addmm.default, [ROW, transposed(32, 64), NARROW]),
    "of many": (aten.bmm.default, [NARROW.view(4, 16, 48), NARROW.view(4, 48, 16)]),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_the_scratch_of_a_16_bit_product_is_known(case):
    operator, args = PRODUCTS[case]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(arg) for arg in args]
        predicted = predicted_scratch(operator, fakes)
    assert predicted == measured_scratch(operator, args)


def test_a_large_product_is_not_computed():
    with FakeTensorMode():
        large = torch.empty(100_000, 100_000, dtype=torch.bfloat16)
        assert predicted_scratch(aten.mm.default, [large, large]) == 0


def test_a_product_in_fp32_of_plain_matrices_allocates_nothing():
    args = [torch.zeros(2, 2), torch.zeros(2, 2)]
    assert predicted_scratch(aten.mm.default, args) == 0
