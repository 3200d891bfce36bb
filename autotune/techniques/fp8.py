"""fp8: matrix products of the blocks' linear layers in 8 bits, with one dynamic scale per tensor.

Saves time on tensor cores that support fp8, and the 16-bit copies of what such a product saves for
backward. Costs the computation of the scales, and precision (3 bits of mantissa in forward, 2 in
backward). Needs torchao, Hopper or Ada for speed, and matrices whose sides are multiples of 16. The
head, whose logits decide the loss, stays in bf16, and so do routers of mixtures
(`shipped/routers.py`, `studies/routers/`). Source: arXiv:2209.05433,
https://docs.pytorch.org/ao/stable/workflows/training.html
"""

import torch
from torch import nn

from autotune.errors import first_line_of
from autotune.models.parts import ModelParts
from autotune.shipped.fp8 import convert
from autotune.spec.config import Precision
from autotune.techniques.tried_layer import why_wrong


def convert_blocks(parts: ModelParts, precision: Precision, *, emulate: bool = False) -> None:
    """Converts the linear layers of all blocks, for precision fp8.

    `emulate` rounds to fp8 and multiplies in higher precision, for hardware without fp8.
    """
    if precision == "fp8":
        for block in parts.blocks:
            convert(block, emulate=emulate)


def unavailable(*, device: torch.device) -> str | None:
    """Returns why fp8 does not work on `device`; None if it does.

    It is found by a product, forward and backward.
    """
    try:
        plain = nn.Linear(64, 64, bias=False, device=device)
        return why_wrong(convert(nn.Sequential(plain)), plain.weight.detach())
    except (
        RuntimeError,
        NotImplementedError,
        AssertionError,
        ImportError,
        AttributeError,
    ) as error:
        return first_line_of(error)
