"""Computes linear layers by products of 8-bit integers, each row with a scale of its own."""

from typing import Any

import torch
from torch import Tensor, nn

from autotune.shipped.fp8_sizes import FP8_MULTIPLE
from autotune.shipped.routers import routers_in

LARGEST = 127
"""The largest number of a row, or the least, becomes this or -127."""
_LEAST_LARGEST = 1e-12
"""A row whose numbers are all smaller counts as one of zeros."""


def use_int8(module: nn.Module) -> None:
    """Makes the suitable linear layers of `module` use int8; parameters stay the same objects.

    Routers of mixtures are left out.
    """
    routers = routers_in(module)
    for layer in module.modules():
        if can_be_int8(layer) and layer not in routers:
            layer.__class__ = Int8Linear


def can_be_int8(layer: nn.Module) -> bool:
    """Returns whether it is a plain linear layer with sides that are multiples of 16."""
    if type(layer) is not nn.Linear:
        return False
    return layer.in_features % FP8_MULTIPLE == 0 and layer.out_features % FP8_MULTIPLE == 0


class Int8Linear(nn.Linear):
    """A linear layer whose products, forward and backward, are those of 8-bit integers.

    Weights keep their dtype. Results have that of the input, or of autocast.
    """

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        result: Tensor = _Int8Product.apply(input.to(dtype), self.weight)  # type: ignore[no-untyped-call]
        return result if self.bias is None else result + self.bias.to(dtype)


class _Int8Product(torch.autograd.Function):
    """[..., k] times the transpose of [n, k], and its gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        product = _product(rows.flatten(0, -2), weight, dtype=rows.dtype)
        return product.view(*rows.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        gradient = gradient.flatten(0, -2)
        of_rows = of_weight = None
        if ctx.needs_input_grad[0]:
            of_rows = _product(gradient, weight.t(), dtype=rows.dtype).view(rows.shape)
        if ctx.needs_input_grad[1]:
            of_weight = _product(gradient.t(), rows.flatten(0, -2).t(), dtype=weight.dtype)
        return of_rows, of_weight


def _product(first: Tensor, second: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Returns first @ second.T for [m, k] and [n, k], summed in 32-bit integers."""
    first_8, first_scales = quantized_rows(first)
    second_8, second_scales = quantized_rows(second)
    product = torch._int_mm(first_8, second_8.t()) * first_scales
    return product.mul_(second_scales.t()).to(dtype)


def quantized_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Returns 8-bit integers [rows, columns], and the scales [rows, 1] that they are times."""
    least, largest = torch.aminmax(matrix, dim=1, keepdim=True)
    scales = torch.maximum(largest, -least).float().clamp_(min=_LEAST_LARGEST) / LARGEST
    rounded = (matrix / scales).round_()
    return rounded.to(torch.int8, memory_format=torch.contiguous_format), scales
