"""An optimizer that a script has made, made again with another fusion: same class, same settings, same groups."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autotune.errors import IllegalConfiguration
from autotune.spec.config import OptimizerFusion
from autotune.techniques.step_in_backward import SteppedInBackward, step_in_backward

_FLAGS = {"foreach": "foreach", "kernel": "fused"}


def with_fusion(optimizer: Optimizer, fusion: OptimizerFusion) -> Optimizer:
    """Returns an optimizer of the same class, settings and groups, not stepped yet.

    Raises IllegalConfiguration for one that has stepped or has a scheduler already, or that has no
    such fusion.
    """
    if optimizer.state:
        raise IllegalConfiguration(
            "the optimizer has taken steps already",
            hint="call autotune.apply before the first step",
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
    """Takes two such steps with a small parameter. Raises IllegalConfiguration."""
    group = next(group for group in optimizer.param_groups if group["params"])
    like = group["params"][0].detach()
    small = nn.Parameter(like.new_ones([min(2, size) for size in like.shape]))
    stepped = step_in_backward(_made_again(optimizer, [{**group, "params": [small]}], None))
    assert isinstance(stepped, SteppedInBackward)
    name = type(optimizer).__name__
    try:
        kept = []
        for _ in range(2):
            small.grad = torch.ones_like(small)
            stepped.step()
            kept.append(dict(vars(stepped._single)))
    except (RuntimeError, TypeError, ValueError) as error:
        raise IllegalConfiguration(
            f"{name} cannot step in the backward pass: {str(error).splitlines()[0]}",
            hint="use another optimizer_fusion",
        ) from error
    # What it says of itself once is well; what it counts at each step it would count for each
    # parameter.
    ours = ("state", "param_groups")
    counted = [
        each
        for each, value in kept[1].items()
        if each not in ours and value is not kept[0].get(each)
    ]
    if counted:
        raise IllegalConfiguration(
            f"{name} cannot step in the backward pass: it changes {', '.join(counted)} at each step, for all "
            "parameters together",
            hint="use another optimizer_fusion",
        )


def _settings_of(optimizer: Optimizer) -> set[str]:
    return set(inspect.signature(type(optimizer)).parameters)


def _made_again(
    optimizer: Optimizer, groups: Sequence[dict[str, Any]], flag: str | None
) -> Optimizer:
    known = _settings_of(optimizer)
    flags = {name: name == flag for name in _FLAGS.values() if name in known}
    settings = {name: value for name, value in optimizer.defaults.items() if name in known} | flags
    # Also what the script keeps in its groups for its own use, such as a factor of the learning
    # rate.
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
