"""fp8: the products of the blocks' linear layers in eight bits, with a scale a tensor found as they come.

Saves time on tensor cores that have fp8, and the 16-bit copies of what such a product keeps; costs
the scales, and precision (numbers of 3 bits of mantissa forward, 2 backward). Needs torchao, Hopper
or Ada for speed, and matrices whose sides are multiples of 16; the head, whose logits decide the
loss, stays in bf16. Source: arXiv:2209.05433,
https://docs.pytorch.org/ao/stable/workflows/training.html
"""

from importlib.util import find_spec

import torch
from torch import nn

from autotune.models.parts import ModelParts
from autotune.spec.config import FP8_MULTIPLE, Precision


def convert_blocks(parts: ModelParts, precision: Precision, *, emulate: bool = False) -> None:
    """`emulate`: rounds to fp8 and multiplies in higher precision, for hardware that cannot."""
    if precision == "fp8":
        for block in parts.blocks:
            convert(block, emulate=emulate)


def convert(module: nn.Module, *, emulate: bool = False) -> nn.Module:
    """Every linear layer in it whose matrix can be multiplied in fp8 will be; parameters stay the same objects."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    converted: nn.Module = convert_to_float8_training(
        module,
        config=Float8LinearConfig(emulate=emulate),
        module_filter_fn=lambda layer, _name: can_be_fp8(layer),
    )
    return converted


def can_be_fp8(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and not (
        layer.in_features % FP8_MULTIPLE or layer.out_features % FP8_MULTIPLE
    )


def torchao_is_missing() -> str | None:
    return (
        None
        if find_spec("torchao")
        else 'torchao is not installed: pip install "autotune[torchao]"'
    )


def unavailable(*, device: torch.device) -> str | None:
    """Why it does not work on `device`, found by a product forward and backward; None if it does."""
    if missing := torchao_is_missing():
        return missing
    try:
        layer = convert(nn.Sequential(nn.Linear(64, 64, bias=False, device=device)))
        with torch.autocast(device.type, dtype=torch.bfloat16):
            product = layer(torch.ones(64, 64, device=device, requires_grad=True))
        product.float().sum().backward()
    except (
        RuntimeError,
        NotImplementedError,
        AssertionError,
        ImportError,
        AttributeError,
    ) as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None
