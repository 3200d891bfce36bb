"""Adds adapters to a model by peft, in an exported script.

Trials do it on fake tensors as well (`autotune/techniques/adapter.py`).
"""

from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from autotune.shipped.experts import outlined


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
    model: nn.Module,
    layers: list[str],
    settings: dict[str, Any],
    *,
    dtype: torch.dtype,
    modules_dtype: torch.dtype | None = None,
    experts: Sequence[str] = (),
) -> None:
    """Freezes the model and adds adapters to it, which are trained and stored in `dtype`.

    Modules that the settings train whole are stored in `modules_dtype`. `experts` are the weights
    of experts that get adapters, too. Raises ValueError where peft gives other modules adapters.
    """
    model.requires_grad_(False)
    settings = {**settings, "target_parameters": [*experts]} if experts else settings
    transposed = all(is_transposed(model.get_submodule(path)) for path in layers)
    config = LoraConfig(target_modules=layers, fan_in_fan_out=transposed, **settings)
    with outlined(model, experts):
        if hasattr(model, "add_adapter"):  # of transformers, whose Trainer saves adapters apart
            model.add_adapter(config)  # type: ignore[operator]
        else:
            inject_adapter_in_model(config, model)
    for path in layers:
        # peft 0.21.2 takes layers of some mixtures, by their names, to be the experts that they
        # were in transformers 4: a dense block of GLM-4-MoE, shared experts of Qwen2-MoE.
        if not hasattr(model.get_submodule(path), "lora_A"):
            raise ValueError(
                f"peft {version('peft')} puts no adapter beside linear layer {path}, but beside "
                "weights of experts: choose adapter_targets attention"
            )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_whole = ".modules_to_save." in name
            parameter.data = parameter.data.to((is_whole and modules_dtype) or dtype)
