"""Optimizers, made by what is declared of them in `autotune/spec/optimizers.py`."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn

from autotune.shipped.matrices import matrices_apart
from autotune.spec.config import OptimizerFusion
from autotune.spec.optimizers import OPTIMIZERS, Optimizer
from autotune.techniques.extras import bitsandbytes

PAGED_ELEMENTS = 100_000
"""bitsandbytes has the state of parameters with fewer elements in ordinary memory. Source:
`Optimizer8bit.get_state_buffer`."""


Parameters = Sequence[nn.Parameter] | Sequence[dict[str, Any]]
"""What an optimizer is made of: parameters, or groups of them."""


def trained_parameters(model: nn.Module, name: Optimizer) -> Parameters:
    """Returns the trained parameters of a model, in groups where the optimizer needs them."""
    if of_matrices := OPTIMIZERS[name].of_matrices:
        return matrices_apart(model, of_matrices)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def make_optimizer(
    parameters: Parameters,
    name: Optimizer,
    *,
    fusion: OptimizerFusion,
    learning_rate: float,
) -> torch.optim.Optimizer:
    """Returns the optimizer of parameters or groups, with the update that `fusion` selects."""
    facts = OPTIMIZERS[name]
    assert facts.has_fusion(fusion)
    if facts.package == "bitsandbytes":
        bitsandbytes()
    kind = getattr(import_module(facts.module), facts.class_name)
    optimizer: torch.optim.Optimizer = kind(
        parameters, lr=learning_rate, **facts.arguments, **facts.flags(fusion)
    )
    return optimizer
