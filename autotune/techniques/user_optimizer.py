"""Creates a script's optimizer again with another fusion: same class, settings and groups."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autotune.errors import IllegalConfiguration
from autotune.shipped.step_in_backward import SteppedInBackward, step_in_backward
from autotune.spec.config import OptimizerFusion

_FLAGS = {"foreach": "foreach", "kernel": "fused"}


def with_fusion(optimizer: Optimizer, fusion: OptimizerFusion) -> Optimizer:
    """Returns an optimizer of the same class, settings and groups, not stepped yet.

    Raises IllegalConfiguration for an optimizer that has stepped, that has a learning-rate
    scheduler, or that does not support the fusion.
    """
    if optimizer.state:
        raise IllegalConfiguration(
            "the optimizer has taken steps already",
            hint="call autotune.apply before the first step",
        )
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise IllegalConfiguration(
            "the optimizer has a learning-rate scheduler already, which would not change the rates "
            "of the optimizer that replaces it",
            hint="call autotune.apply first, then create the scheduler for the returned optimizer",
        )
    flag = _FLAGS.get(fusion)
    if flag is not None and flag not in _settings_of(optimizer):
        name = type(optimizer).__name__
        raise IllegalConfiguration(f"{name} has no {flag}", hint="use another optimizer_fusion")
    recreated = _recreate(optimizer, optimizer.param_groups, flag)
    if fusion != "backward":
        return recreated
    _check_steps_in_backward(optimizer)
    return step_in_backward(recreated)


def _check_steps_in_backward(optimizer: Optimizer) -> None:
    """Tries two steps in backward with a small parameter.

    Raises IllegalConfiguration if they fail, or if the optimizer counts something at each step.
    """
    group = next(group for group in optimizer.param_groups if group["params"])
    like = group["params"][0].detach()
    small = nn.Parameter(like.new_ones([min(2, size) for size in like.shape]))
    stepped = step_in_backward(_recreate(optimizer, [{**group, "params": [small]}], None))
    assert isinstance(stepped, SteppedInBackward)
    name = type(optimizer).__name__
    try:
        attributes_after_step = []
        for _ in range(2):
            small.grad = torch.ones_like(small)
            stepped.step()
            attributes_after_step.append(dict(vars(stepped._single)))
    except (RuntimeError, TypeError, ValueError) as error:
        raise IllegalConfiguration(
            f"{name} cannot step in the backward pass: {str(error).splitlines()[0]}",
            hint="use another optimizer_fusion",
        ) from error
    # An attribute that is set once does no harm. One that changes at each step would change for
    # each parameter instead.
    first, second = attributes_after_step
    changed = []
    for attribute, value in second.items():
        if attribute in ("state", "param_groups"):  # set by the step in backward
            continue
        if value is not first.get(attribute):
            changed.append(attribute)
    if changed:
        raise IllegalConfiguration(
            f"{name} cannot step in the backward pass: it changes {', '.join(changed)} at each "
            "step, for all parameters together",
            hint="use another optimizer_fusion",
        )


def _settings_of(optimizer: Optimizer) -> set[str]:
    return set(inspect.signature(type(optimizer)).parameters)


def _recreate(
    optimizer: Optimizer, groups: Sequence[dict[str, Any]], flag: str | None
) -> Optimizer:
    """Returns an optimizer of the same class and settings; `flag` is the setting to turn on."""
    known = _settings_of(optimizer)
    flags = {name: name == flag for name in _FLAGS.values() if name in known}
    settings = {name: value for name, value in optimizer.defaults.items() if name in known} | flags
    # Includes what the script stores in its groups, such as a factor for the learning rate.
    copies = [{**group, **flags} for group in groups]
    make: Any = type(optimizer)
    try:
        recreated: torch.optim.Optimizer = make(copies, **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        name = type(optimizer).__name__
        reason = str(error).splitlines()[0]
        raise IllegalConfiguration(
            f"{name} cannot be made with {flag or 'its own settings'}: {reason}",
            hint="use another optimizer_fusion, or one of torch's optimizers",
        ) from error
    return recreated
