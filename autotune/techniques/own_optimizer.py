"""An optimizer that a script has made, made again with another fusion: same class, same settings, same groups."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autotune.config import OptimizerFusion
from autotune.errors import IllegalConfiguration
from autotune.techniques.step_in_backward import step_in_backward

_FLAGS = {"foreach": "foreach", "kernel": "fused"}


def with_fusion(optimizer: Optimizer, fusion: OptimizerFusion) -> Optimizer:
    """Returns an optimizer of the same class, settings and groups, not stepped yet.

    Raises IllegalConfiguration for one that has stepped or has a scheduler already, or that has no such fusion.
    """
    if optimizer.state:
        raise IllegalConfiguration(
            "the optimizer has taken steps already", hint="call autotune.apply before the first step"
        )
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise IllegalConfiguration(
            "the optimizer has a learning-rate scheduler already, which would not reach the one that takes its place",
            hint="call autotune.apply first, and make the scheduler for the optimizer that it returns",
        )
    flag, name = _FLAGS.get(fusion), type(optimizer).__name__
    if flag is not None and flag not in _settings_of(optimizer):
        raise IllegalConfiguration(f"{name} has no {flag}", hint="use another optimizer_fusion")
    made = _made_again(optimizer, optimizer.param_groups, flag)
    if fusion != "backward":
        return made
    _check_steps_in_backward(optimizer)
    return step_in_backward(made)


def _check_steps_in_backward(optimizer: Optimizer) -> None:
    """Takes one such step with a small parameter. Raises IllegalConfiguration."""
    group = optimizer.param_groups[0]
    small = nn.Parameter(torch.ones_like(group["params"][0].flatten()[:1]))
    stepped = step_in_backward(_made_again(optimizer, [{**group, "params": [small]}], None))
    small.grad = torch.ones_like(small)
    try:
        stepped.step()
    except (RuntimeError, TypeError, ValueError) as error:
        raise IllegalConfiguration(
            f"{type(optimizer).__name__} cannot step in the backward pass: {str(error).splitlines()[0]}",
            hint="use another optimizer_fusion",
        ) from error


def _settings_of(optimizer: Optimizer) -> set[str]:
    return set(inspect.signature(type(optimizer)).parameters)


def _made_again(optimizer: Optimizer, groups: Sequence[dict[str, Any]], flag: str | None) -> Optimizer:
    known = _settings_of(optimizer)
    flags = {name: name == flag for name in _FLAGS.values() if name in known}
    settings = {name: value for name, value in optimizer.defaults.items() if name in known} | flags
    # Also what the script keeps in its groups for its own use, such as a factor of the learning rate.
    copies = [{**group, **flags} for group in groups]
    make: Any = type(optimizer)
    try:
        made: torch.optim.Optimizer = make(copies, **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        name, reason = type(optimizer).__name__, str(error).splitlines()[0]
        raise IllegalConfiguration(
            f"{name} cannot be made with {flag or 'its own settings'}: {reason}",
            hint="use another optimizer_fusion, or one of torch's optimizers",
        ) from error
    return made
