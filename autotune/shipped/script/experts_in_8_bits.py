"""Stores weights of experts in 8 bits, by torchao."""

import torch
from torch import nn
from torchao.quantization import quantize_

from autotune.shipped.script.written import DEVICE, QUANTIZATION, WEIGHTS_DTYPE


@torch.no_grad()
def quantize_experts(model: nn.Module, weights: list[str]) -> None:
    """Stores these weights in 8 bits, one after the other on the device."""
    for path in weights:
        weight = model.get_parameter(path).to(WEIGHTS_DTYPE).to(DEVICE)
        layer = nn.Linear(1, 1, bias=False, device="meta")  # which torchao takes weights of
        layer.weight = nn.Parameter(weight, requires_grad=False)
        quantize_(layer, QUANTIZATION)
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, layer.weight)
