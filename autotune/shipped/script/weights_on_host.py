"""Moves a model to the device but for its weights, which go there when they are divided."""

import torch
from torch import nn

from autotune.shipped.script.buffers import move_buffers
from autotune.shipped.script.written import WEIGHTS_DTYPE


@torch.no_grad()
def move_to_device(model: nn.Module) -> None:
    """Casts parameters, which go to the device when they are divided; buffers go there now."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(WEIGHTS_DTYPE)
    move_buffers(model)
