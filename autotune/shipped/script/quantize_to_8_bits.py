"""Stores frozen weights in 8 bits, by torchao."""

import torch
from torch import nn
from torchao.quantization import quantize_

from autotune.shipped.script.written import DEVICE, QUANTIZATION, WEIGHTS_DTYPE


@torch.no_grad()
def quantize(model: nn.Module, layers: list[str]) -> None:
    """Stores the weights of these layers in 8 bits, one after the other on the device."""
    for path in layers:
        layer = model.get_submodule(path)
        if isinstance(layer, nn.Linear):
            layer.weight.requires_grad_(False).data = layer.weight.to(WEIGHTS_DTYPE).to(DEVICE)
            quantize_(layer, QUANTIZATION)
