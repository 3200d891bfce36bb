"""Casts the weights of a model of transformers."""

import torch
from torch import nn


def set_weights_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts the floating-point parameters, not buffers such as the frequencies of positions."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
