"""Adds up the gradients of micro batches in float32, of weights with fewer bits.

Each gradient is rounded to the number format of its weight before the optimizer's step, one after
the other, so that optimizers see what they are made for and only one gradient is there twice. A sum
in bf16 has 8 bits of mantissa: it loses what of a micro batch is less than 1/512 of the sum so far.
Needs `Tensor.grad_dtype`, of torch 2.10.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor

Accumulating = TypeVar("Accumulating", bound=torch.optim.Optimizer)


def accumulate_in_fp32(optimizer: Accumulating) -> Accumulating:
    """Makes the gradients of an optimizer's parameters add up in float32; returns the optimizer.

    They must have no gradient yet. A step frees all gradients.
    """
    parameters: list[Tensor] = [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]

    def round_gradients(*_: Any) -> None:
        for parameter in parameters:
            exact = parameter.grad
            if exact is not None:
                parameter.grad = None  # a gradient must have the dtype that is set
                parameter.grad_dtype = parameter.dtype
                parameter.grad = exact.to(parameter.dtype)

    def begin_sums(*_: Any) -> None:
        for parameter in parameters:
            parameter.grad = None
            parameter.grad_dtype = torch.float32

    begin_sums()
    optimizer.register_step_pre_hook(round_gradients)
    optimizer.register_step_post_hook(begin_sums)
    return optimizer
