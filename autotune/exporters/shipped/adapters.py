"""Definitions that exports copy into scripts that train adapters. Nothing here runs in autotune.

They are in `train.py` of the pytorch export and in `autotune_trainer.py` of the transformers
export.
"""

import math
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn


def linear_layers(model: nn.Module, parts: Iterable[nn.Module]) -> list[str]:
    """Returns the paths of the linear layers in these parts of the model."""
    inside = {module for part in parts for module in part.modules()}
    return [
        path
        for path, module in model.named_modules()
        if module in inside and (isinstance(module, nn.Linear) or is_transposed(module))
    ]


def is_transposed(module: nn.Module) -> bool:
    """Returns whether a module is a linear layer as GPT-2 has it, with inputs as rows."""
    return type(module).__name__ == "Conv1D"


def add_adapters(
    model: nn.Module, layers: list[str], settings: dict[str, Any], *, dtype: torch.dtype
) -> None:
    """Freezes the model and adds adapters to it, which are trained and stored in `dtype`."""
    model.requires_grad_(False)
    transposed = all(is_transposed(model.get_submodule(path)) for path in layers)
    config = LoraConfig(target_modules=layers, fan_in_fan_out=transposed, **settings)
    if hasattr(model, "add_adapter"):  # of transformers, whose Trainer saves adapters apart
        model.add_adapter(config)  # type: ignore[operator]
    else:
        inject_adapter_in_model(config, model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


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


def is_quantized(parameter: Tensor) -> bool:
    """Returns whether a weight is stored in fewer than 16 bits, by bitsandbytes or torchao."""
    return hasattr(parameter, "quant_state") or type(parameter).__module__.startswith("torchao.")
