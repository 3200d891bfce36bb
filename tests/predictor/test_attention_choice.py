"""The attention kernel: as releases of torch chose it, and as torch chooses on this GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.errors import PredictionImpossible
from autotune.predictor.attention import chosen_kernel
from autotune.predictor.gpu import Gpu, gpu_of

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
NAMES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
"""torch.nn.attention.SDPBackend."""

CALLS = {
    "bf16": {},
    "fp32": {"dtype": FP32},
    "fp16": {"dtype": FP16},
    "bf16, heads of 25": {"size": 25},
    "fp32, heads of 25": {"size": 25, "dtype": FP32},
    "fp32, heads of 20": {"size": 20, "dtype": FP32},
    "bf16, heads of 160": {"size": 160},
    "bf16, heads of 200": {"size": 200},
    "bf16, heads of 256": {"size": 256},
    "bf16, heads of 264": {"size": 264},
    "bf16, heads of 192 and 128": {"size": 192, "value_size": 128},
    "bf16, heads of 200, no gradients": {"size": 200, "with_gradients": False},
    "bf16, additive mask": {"mask": (1, 4, 128, 128)},
    "bf16, trained mask": {"mask": (1, 4, 128, 128), "mask_is_trained": True},
    "bf16, mask a head": {"mask": (4, 128, 128)},
    "bf16, boolean mask": {"mask": (128, 128), "mask_dtype": torch.bool},
    "fp32, additive mask": {"dtype": FP32, "mask": (4, 128, 128)},
    "bf16, grouped queries": {"key_heads": 2},
    "fp32, grouped queries": {"key_heads": 2, "dtype": FP32},
    "bf16, grouped queries, boolean mask": {
        "key_heads": 2,
        "mask": (128, 128),
        "mask_dtype": torch.bool,
    },
    "bf16, dropout 0.1": {"dropout": 0.1},
    "bf16, dropout 0.125": {"dropout": 0.125},
    "bf16, heads of 256, dropout 0.125": {"size": 256, "dropout": 0.125},
    "bf16, fewer queries": {"queries": 64},
    "bf16, not causal, fewer queries": {"queries": 64, "is_causal": False},
    "bf16, one key": {"queries": 1, "keys": 1},
}


def tensors_of(
    *,
    dtype=BF16,
    size=64,
    value_size=None,
    key_heads=4,
    queries=128,
    keys=128,
    with_gradients=True,
    mask=None,
    mask_dtype=None,
    mask_is_trained=False,
    dropout=0.0,
    is_causal=True,
    device="cpu",
):
    """(query, key, value, mask), {flags}"""
    of = {"dtype": dtype, "device": device, "requires_grad": with_gradients}
    made = (
        torch.empty(2, 4, queries, size, **of),
        torch.empty(2, key_heads, keys, size, **of),
        torch.empty(2, key_heads, keys, value_size or size, **of),
        None if mask is None else torch.empty(mask, dtype=mask_dtype or dtype, device=device),
    )
    if mask_is_trained:
        made[3].requires_grad_()
    return made, {
        "dropout": dropout,
        "is_causal": is_causal and mask is None,
        "enable_gqa": key_heads != 4,
    }


def choice(call, gpu, **more):
    with FakeTensorMode():
        tensors, flags = tensors_of(**CALLS[call])
        return chosen_kernel(*tensors, **flags, gpu=gpu, **more)


SINCE_AMPERE = {
    "bf16": "flash",
    "fp32": "efficient",
    "fp16": "flash",
    "bf16, heads of 25": "flash",
    "fp32, heads of 25": "math",
    "fp32, heads of 20": "efficient",
    "bf16, heads of 160": "flash",
    "bf16, heads of 200": "flash",
    "bf16, heads of 256": "flash",
    "bf16, heads of 264": "efficient",
    "bf16, heads of 192 and 128": "efficient",
    "bf16, heads of 200, no gradients": "flash",
    "bf16, additive mask": "efficient",
    "bf16, trained mask": "efficient",
    "bf16, mask a head": "efficient",
    "bf16, boolean mask": "efficient",
    "fp32, additive mask": "efficient",
    "bf16, grouped queries": "flash",
    "fp32, grouped queries": "math",
    "bf16, grouped queries, boolean mask": "math",
    "bf16, dropout 0.1": "flash",
    "bf16, dropout 0.125": "flash",
    "bf16, heads of 256, dropout 0.125": "flash",
    "bf16, fewer queries": "efficient",
    "bf16, not causal, fewer queries": "flash",
    "bf16, one key": "flash",
}
"""What torch 2.11 chose on compute capability 8.0 (`torch._fused_sdp_choice`); the tables below say
what differs."""
LITTLE_SHARED_MEMORY = {
    "bf16, heads of 200": "efficient",
    "bf16, heads of 256, dropout 0.125": "efficient",
}
BLACKWELL = {
    **dict.fromkeys(
        (
            *(
                "bf16",
                "fp16",
                "bf16, heads of 192 and 128",
                "bf16, additive mask",
                "bf16, boolean mask",
            ),
            *("bf16, grouped queries", "bf16, grouped queries, boolean mask", "bf16, dropout 0.1"),
            *("bf16, dropout 0.125", "bf16, fewer queries", "bf16, not causal, fewer queries"),
        ),
        "cudnn",
    )
}
LARGE_HEADS = dict.fromkeys(
    (
        *(
            "bf16, heads of 160",
            "bf16, heads of 200",
            "bf16, heads of 256",
            "bf16, heads of 200, no gradients",
        ),
        "bf16, heads of 256, dropout 0.125",
    ),
    "cudnn",
)
NEWER = {
    "bf16, dropout 0.1": "flash",
    "bf16, heads of 160": "flash",
    "bf16, heads of 200": "flash",
    "fp32, grouped queries": "efficient",
}
CHOSEN = [
    ("8.0", "2.11", {}),
    ("8.9", "2.11", LITTLE_SHARED_MEMORY),
    ("12.0", "2.11", LITTLE_SHARED_MEMORY),
    ("9.0", "2.11", {**BLACKWELL, **LARGE_HEADS}),
    ("9.0", "2.13", {**BLACKWELL, **LARGE_HEADS, "bf16, dropout 0.1": "flash"}),
    ("9.0", "2.15", {**BLACKWELL, **LARGE_HEADS, **NEWER}),
    ("10.0", "2.11", BLACKWELL),
    ("10.0", "2.15", {**BLACKWELL, **LARGE_HEADS, **NEWER}),
    ("8.0", "2.8", {}),
    ("9.0", "2.8", {}),
]


@pytest.mark.parametrize(("capability", "release", "differing"), CHOSEN)
def test_the_kernel_is_the_one_that_torch_chose(capability, release, differing):
    gpu = gpu_of(capability, release)
    assert {call: choice(call, gpu) for call in CALLS} == {**SINCE_AMPERE, **differing}


def test_before_ampere_bf16_uses_plain_operators():
    gpu = gpu_of("7.5", "2.11")
    assert [choice(call, gpu) for call in ("bf16", "fp16", "fp32", "fp32, heads of 25")] == [
        *("math", "efficient", "efficient", "efficient")
    ]


def test_cudnn_supports_ampere_and_nothing_before_it():
    assert choice("fp16", gpu_of("8.0", "2.11"), backend="cudnn") == "cudnn"
    with pytest.raises(PredictionImpossible, match="attention cudnn does not support"):
        choice("fp16", gpu_of("7.5", "2.11"), backend="cudnn")


def test_a_backend_that_does_not_support_a_call_is_named():
    with pytest.raises(
        PredictionImpossible,
        match=r"attention flash does not support .* of compute capability 8\.0",
    ):
        choice("fp32", gpu_of("8.0", "2.11"), backend="flash")


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS)
def test_the_kernel_is_the_one_that_torch_chooses_on_this_gpu(call):
    major, minor = torch.cuda.get_device_capability()
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    tensors, flags = tensors_of(**CALLS[call], device="cuda")
    chosen = torch._fused_sdp_choice(
        *tensors, flags["dropout"], flags["is_causal"], enable_gqa=flags["enable_gqa"]
    )
    gpu = Gpu(capability=(major, minor), release=release)
    assert chosen_kernel(*tensors, **flags, gpu=gpu) == NAMES[int(chosen)]


def test_heads_that_are_not_contiguous_in_memory_use_plain_operators():
    query, key = torch.empty(2, 4, 128, 64, dtype=BF16), torch.empty(2, 4, 64, 128, dtype=BF16)
    chosen = chosen_kernel(
        *(query, key.transpose(2, 3), query, None),
        dropout=0.0,
        is_causal=True,
        enable_gqa=False,
        gpu=gpu_of("8.0", "2.11"),
    )
    assert chosen == "math"
