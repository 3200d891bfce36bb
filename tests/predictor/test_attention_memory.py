"""Memory inside attention kernels: numbers from torch 2.11, and measured on this GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.predictor.attention import scratch_of_attention
from autotune.predictor.gpu import Gpu, gpu_of

_aten = torch.ops.aten
FLASH, FLASH_BACKWARD = (
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_backward.default,
)
EFFICIENT, EFFICIENT_BACKWARD = (
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_efficient_attention_backward.default,
)
CUDNN_BACKWARD = _aten._scaled_dot_product_cudnn_attention_backward.default
BF16, FP32 = torch.bfloat16, torch.float32


def bytes_during(operator, args, *, gpu):
    """Returns the most that the kernel has at once."""
    return max(map(sum, scratch_of_attention(operator, args, gpu=gpu)), default=0)


def tensors(batch, heads, length, size, *, key_heads=None, dtype=BF16, device="cpu"):
    """Query, key and value [batch, heads, sequence, size], as a model's layer lays them out."""
    return [
        torch.empty(batch, length, count, size, dtype=dtype, device=device).transpose(1, 2)
        for count in (heads, key_heads or heads, key_heads or heads)
    ]


@pytest.mark.parametrize(
    ("operator", "shape", "more", "measured_bytes"),
    [
        (FLASH_BACKWARD, (4, 16, 512, 64), {}, 8519680),
        (FLASH_BACKWARD, (4, 16, 512, 80), {}, 12713984),
        (FLASH_BACKWARD, (4, 16, 512, 136), {}, 25296896),
        (FLASH_BACKWARD, (4, 16, 512, 224), {}, 33685504),
        (FLASH_BACKWARD, (4, 16, 1000, 64), {}, 17039360),
        (FLASH_BACKWARD, (4, 16, 512, 64), {"key_heads": 4}, 16908288),
        (EFFICIENT_BACKWARD, (4, 16, 512, 64), {"dtype": FP32}, 8650752),
        (EFFICIENT_BACKWARD, (4, 16, 512, 64), {}, 8527872),
        (EFFICIENT_BACKWARD, (4, 16, 512, 32), {"dtype": FP32}, 8527872),
        (EFFICIENT_BACKWARD, (4, 16, 512, 128), {}, 29507584),
        (EFFICIENT_BACKWARD, (4, 16, 512, 256), {}, 58867712),
        (EFFICIENT_BACKWARD, (4, 16, 1000, 128), {"dtype": FP32}, 33843200),
        (EFFICIENT_BACKWARD, (4, 16, 1000, 256), {}, 92563456),
    ],
)
def test_a_backward_pass_allocates_what_torch_allocated_on_an_a100(
    operator, shape, more, measured_bytes
):
    with FakeTensorMode():
        query, key, value = tensors(*shape, **more)
        arguments = (query, query, key, value, query)
        worked_out = bytes_during(operator, arguments, gpu=gpu_of("8.0", "2.11"))
    assert worked_out == pytest.approx(measured_bytes, rel=0.02)


def test_flash_copies_an_output_and_a_gradient_that_have_the_heads_before_the_sequence():
    gpu = gpu_of("8.0", "2.11")
    with FakeTensorMode():
        query, key, value = tensors(4, 16, 512, 56)
        by_head = query.contiguous()
        plain = bytes_during(FLASH_BACKWARD, (query, query, key, value, query), gpu=gpu)
        copied = bytes_during(FLASH_BACKWARD, (by_head, query, key, value, by_head), gpu=gpu)
    assert copied - plain == 2 * by_head.numel() * by_head.element_size()


def test_heads_over_128_are_added_up_in_fp32_by_the_memory_efficient_kernel():
    with FakeTensorMode():
        query, key, value = tensors(4, 16, 512, 256)
        worked_out = bytes_during(EFFICIENT.default, (query, key, value), gpu=gpu_of("8.0", "2.11"))
    assert worked_out == 4 * query.numel()


def test_cudnn_allocates_the_gradient_of_the_query_in_fp32_and_a_sum_per_row():
    with FakeTensorMode():
        query, key, value = tensors(2, 8, 1024, 128)
        worked_out = bytes_during(
            CUDNN_BACKWARD, (query, query, key, value), gpu=gpu_of("9.0", "2.11")
        )
    assert worked_out == 4 * query.numel() + 4 * 2 * 8 * 1024


def test_operators_without_internal_memory_are_not_counted():
    with FakeTensorMode():
        query, key, value = tensors(2, 8, 128, 64)
        assert bytes_during(FLASH.default, (query, key, value), gpu=gpu_of("8.0", "2.11")) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("kernel", ["flash", "efficient", "efficient in fp32"])
def test_the_allocator_of_this_gpu_allocates_as_much(kernel, size):
    capability = torch.cuda.get_device_capability()
    if kernel == "flash" and capability < (8, 0):
        pytest.skip("flash needs compute capability 8.0")
    dtype = (
        FP32 if kernel == "efficient in fp32" else BF16 if capability >= (8, 0) else torch.float16
    )
    query, key, value = tensors(4, 16, 1024, size, dtype=dtype, device="cuda")
    if kernel == "flash":
        result, *saved = FLASH(query, key, value, 0.0, True)
        lse, queries, keys, most_queries, most_keys, seed, offset, _ = saved
        more = (result, lse, queries, keys, most_queries, most_keys, 0.0, True, seed, offset)
        operator = FLASH_BACKWARD
    else:
        result, lse, seed, offset = EFFICIENT(query, key, value, None, True, 0.0, True)
        more = (None, result, lse, seed, offset, 0.0, [True, True, True, False], True)
        operator = EFFICIENT_BACKWARD
    args = (torch.empty_like(result), query, key, value, *more)
    torch.cuda.reset_peak_memory_stats()
    gradients = operator(*args)
    taken = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    assert gradients[0].shape == query.shape
    worked_out = bytes_during(operator, args, gpu=Gpu(capability=capability, release=(2, 11)))
    assert taken <= 1.02 * worked_out
    assert worked_out <= 1.6 * taken
