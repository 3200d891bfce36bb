"""Moves the weights of a model to the device."""

import torch
from torch import nn

from autotune.shipped.script.buffers import move_buffers
from autotune.shipped.script.written import DEVICE, WEIGHTS_DTYPE


@torch.no_grad()
def move_to_device(model: nn.Module) -> None:
    """Casts parameters on the host, one by one; buffers stay in their dtype."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(WEIGHTS_DTYPE).to(DEVICE)
    move_buffers(model)
