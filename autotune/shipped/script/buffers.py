"""Moves the buffers of a model to the device."""

from torch import nn

from autotune.shipped.script.written import DEVICE


def move_buffers(model: nn.Module) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(DEVICE)
