"""The initial adapters of a trial."""

import math
import zlib

import torch
from torch import nn


@torch.no_grad()
def draw_adapters(model: nn.Module, *, seed: int) -> None:
    """Draws the initial adapters of the trial: random numbers that depend on seed and name."""
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            drawn = torch.empty(parameter.shape)
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            parameter.copy_(drawn)
    for module in model.modules():
        for name, magnitude in getattr(module, "lora_magnitude_vector", {}).items():
            # DoRA's magnitudes begin as the norms of the weights, from here on in float32.
            magnitude.update_layer(
                base_layer=module.get_base_layer(),  # type: ignore[operator]
                lora_A=module.lora_A[name].weight,  # type: ignore[index, union-attr]
                lora_B=module.lora_B[name].weight,  # type: ignore[index, union-attr]
                scaling=module.scaling[name],  # type: ignore[index]
            )
