"""What sums over rows allocate on a GPU, compared with torch's allocator."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.predictor.gpu import Gpu, gpu_of
from autotune.predictor.reductions import partial_sums_bytes

SUM = torch.ops.aten.sum.dim_IntList
ON_AN_H200 = gpu_of("9.0", "2.11")


def buffer_of(*shape, dims, gpu=ON_AN_H200, dtype=torch.float32):
    with FakeTensorMode():
        return partial_sums_bytes(SUM, (torch.empty(*shape, dtype=dtype), dims), gpu=gpu)


@pytest.mark.parametrize(
    ("shape", "bytes_of_torch_2_11"),
    [
        ((64, 512), 0),
        ((256, 512), 0),
        ((1024, 512), 4194304),
        ((4096, 512), 16777216),
        ((4096, 1376), 45088768),
        ((4096, 4096), 134217728),
        ((16384, 768), 100663296),
        ((16384, 3072), 138412032),
        ((3072, 8192), 138412032),
        ((131072, 4096), 268435456),
        ((8, 512, 512), 16777216),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_over_rows_keeps_partial_sums(shape, bytes_of_torch_2_11, dtype):
    """As torch 2.11 allocates with the properties of an H200."""
    dims = list(range(len(shape) - 1))
    assert buffer_of(*shape, dims=dims, dtype=dtype) == bytes_of_torch_2_11


def test_a_mean_over_rows_keeps_as_many_as_a_sum():
    with FakeTensorMode():
        args = (torch.empty(5400, 2048), [0])
        assert partial_sums_bytes(torch.ops.aten.mean.dim, args, gpu=ON_AN_H200) == (
            partial_sums_bytes(SUM, args, gpu=ON_AN_H200)
        )


@pytest.mark.parametrize("dims", [[1], [0, 1], [-1]])
def test_a_sum_within_rows_keeps_none(dims):
    assert buffer_of(4096, 512, dims=dims) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(256, 512), (4096, 1376), (16384, 3072), (3072, 8190)])
def test_the_allocator_of_this_gpu_allocates_as_much(shape):
    properties = torch.cuda.get_device_properties(0)
    gpu = Gpu(capability=torch.cuda.get_device_capability(), release=(2, 11))
    if gpu.multiprocessors != properties.multi_processor_count:
        pytest.skip("another GPU of this capability is assumed")
    rows = torch.ones(*shape, device="cuda")
    total = rows.sum(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.sum(rows, 0, out=total)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    assert taken == pytest.approx(partial_sums_bytes(SUM, (rows, [0]), gpu=gpu), abs=2**20 + 4096)


def test_a_dimension_of_one_changes_nothing():
    assert buffer_of(4096, 1, 512, dims=[0]) == buffer_of(4096, 512, dims=[0])
