"""Precision: the number format of weights, of matrix products, or of both.

| value | saves | costs | needs |
|---|---|---|---|
| fp32 | nothing: the reference | | |
| tf32 | no memory; products up to 8x faster | 10 bits of mantissa in products | NVIDIA Ampere |
| bf16-mixed | half of most activations; tensor cores | a bf16 copy of the weights in use | |
| fp16-mixed | the same, with more mantissa | loss scaling against underflow (arXiv:1710.03740) | |
| bf16-true | half of everything | small updates are rounded away: perplexity | |
| bf16-stochastic | the same | a slower update, rounded at random (`stochastic_rounding.py`) | |
| fp64, fp16-true, as-is | nothing: what a script brings (`own_precision.py`) | | |
| fp8 | time, some activations (`fp8.py`) | 3 bits of mantissa | torchao, Hopper or Ada |
| int8-mixed | time (`int8_mixed.py`) | 8 bits by row | NVIDIA Turing for speed |

Turing, Ampere and Hopper stand for these GPUs and newer ones.

Source: https://docs.pytorch.org/docs/stable/amp.html and .../notes/numerical_accuracy.html
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from autotune.errors import first_line_of
from autotune.spec.config import Precision
from autotune.techniques import fp8, int8_mixed

_AUTOCAST_DTYPES = {
    "bf16-mixed": torch.bfloat16,
    "fp16-mixed": torch.float16,
    "fp8": torch.bfloat16,
    "int8-mixed": torch.bfloat16,
}
FIRST_WITH_TF32 = (8, 0)
"""Compute capability of NVIDIA's Ampere. Source: CUDA C++ Programming Guide, Compute Capabilities.
"""
_WEIGHTS_DTYPES = {
    "bf16-true": torch.bfloat16,
    "bf16-stochastic": torch.bfloat16,
    "fp16-true": torch.float16,
    "fp64": torch.float64,
}
"""The other precisions have weights in float32; those of `as-is` stay as they are."""


def set_matmul_precision(precision: Precision) -> None:
    """Allows or forbids TF32 in float32 matrix products, for the whole process."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


def weights_dtype(precision: Precision) -> torch.dtype:
    """Returns the dtype in which the weights are stored."""
    return _WEIGHTS_DTYPES.get(precision, torch.float32)


def compute_dtype(precision: Precision) -> torch.dtype:
    """Returns the dtype of matrix products."""
    return _AUTOCAST_DTYPES.get(precision, weights_dtype(precision))


def autocast(precision: Precision, *, device: torch.device) -> AbstractContextManager[object]:
    """Returns the context in which every forward pass must run."""
    if precision in _AUTOCAST_DTYPES:
        return torch.autocast(device.type, dtype=_AUTOCAST_DTYPES[precision])
    return nullcontext()


def gradient_scaler(precision: Precision, *, device: torch.device) -> torch.amp.GradScaler | None:
    """Returns the scaler of the loss for fp16-mixed; None for other precisions."""
    if precision == "fp16-mixed":
        return torch.amp.GradScaler(device.type)
    return None


def unavailable(precision: Precision, *, device: torch.device) -> str | None:
    """Returns why `precision` does not work on `device`; None if it does.

    It is found by a small product, forward and backward.
    """
    if precision == "fp8":
        return fp8.unavailable(device=device)
    if precision == "int8-mixed":
        return int8_mixed.unavailable(device=device)
    if precision == "tf32":
        return _why_no_tf32(device)
    try:
        layer = nn.Linear(64, 64, bias=False, device=device, dtype=weights_dtype(precision))
        x = torch.randn(64, 64, device=device, dtype=weights_dtype(precision))
        with autocast(precision, device=device):
            product = layer(x)
        product.float().square().sum().backward()
    except (RuntimeError, NotImplementedError) as error:
        return first_line_of(error)
    return None


def _why_no_tf32(device: torch.device) -> str | None:
    """Decides by the hardware: products use TF32 depending on their size, so a test is no proof."""
    if device.type != "cuda":
        return f"TF32 belongs to NVIDIA GPUs, the device is {device.type}"
    if torch.version.hip is not None:
        return "TF32 belongs to NVIDIA GPUs, and this torch is built for AMD's"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < FIRST_WITH_TF32:
        first_major, first_minor = FIRST_WITH_TF32
        return (
            f"TF32 needs compute capability {first_major}.{first_minor}, "
            f"this GPU has {major}.{minor}"
        )
    return None
