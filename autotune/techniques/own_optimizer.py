"""An optimizer that a script has made, made again with another fusion: same class, same settings, same groups."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autotune.config import OptimizerFusion
from autotune.errors import IllegalConfiguration

_FLAGS = {"foreach": "foreach", "kernel": "fused"}


def with_fusion(optimizer: Optimizer, fusion: OptimizerFusion) -> Optimizer:
    """Raises IllegalConfiguration for an optimizer that has stepped already, or has no such fusion."""
    if optimizer.state:
        raise IllegalConfiguration(
            "the optimizer has taken steps already", hint="call autotune.apply before the first step"
        )
    flag, name = _FLAGS.get(fusion), type(optimizer).__name__
    if flag is not None and flag not in _settings_of(optimizer):
        raise IllegalConfiguration(f"{name} has no {flag}", hint="use another optimizer_fusion")
    if fusion == "backward":
        groups = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
        return SteppedInBackward(
            {parameter: _made_again(optimizer, [{**group, "params": [parameter]}], None) for group, parameter in groups}
        )
    return _made_again(optimizer, optimizer.param_groups, flag)


class SteppedInBackward(Optimizer):
    """One optimizer a parameter, stepped and its gradient freed as soon as that gradient is complete.

    To the script it is an optimizer with nothing left to do. Its groups are those of the others, so that what sets a
    learning rate sets it there.
    """

    def __init__(self, optimizers: dict[nn.Parameter, Optimizer]) -> None:
        super().__init__([group for one in optimizers.values() for group in one.param_groups], {})
        self._optimizers = optimizers
        self._handles = [parameter.register_post_accumulate_grad_hook(self._update) for parameter in optimizers]

    def _update(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        optimizer = self._optimizers[parameter]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.state[parameter] = optimizer.state[parameter]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass  # no gradient outlives its step


def _settings_of(optimizer: Optimizer) -> set[str]:
    return set(inspect.signature(type(optimizer)).parameters)


def _made_again(optimizer: Optimizer, groups: Sequence[dict[str, Any]], flag: str | None) -> Optimizer:
    known = _settings_of(optimizer)
    flags = {name: name == flag for name in _FLAGS.values() if name in known}
    settings = {name: value for name, value in optimizer.defaults.items() if name in known} | flags
    copies = [
        {"params": group["params"], **{name: group[name] for name in settings if name in group}, **flags}
        for group in groups
    ]
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
