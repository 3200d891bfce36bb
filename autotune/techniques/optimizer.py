"""Optimizers, made by what is declared of them in `autotune/spec/optimizers.py`."""

from collections.abc import Iterable
from importlib import import_module

import torch
from torch import nn

from autotune.spec.config import OptimizerFusion
from autotune.spec.optimizers import OPTIMIZERS, Optimizer
from autotune.techniques.extras import bitsandbytes

PAGED_ELEMENTS = 100_000
"""bitsandbytes has the state of parameters with fewer elements in ordinary memory. Source:
`Optimizer8bit.get_state_buffer`."""


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    name: Optimizer,
    *,
    fusion: OptimizerFusion,
    learning_rate: float,
) -> torch.optim.Optimizer:
    """Returns the optimizer, with the update that `fusion` selects."""
    facts = OPTIMIZERS[name]
    assert facts.has_fusion(fusion)
    if facts.package == "bitsandbytes":
        bitsandbytes()
    kind = getattr(import_module(facts.module), facts.class_name)
    optimizer: torch.optim.Optimizer = kind(
        parameters, lr=learning_rate, **facts.arguments, **facts.flags(fusion)
    )
    return optimizer
