"""An optimizer that steps during the backward pass: each gradient is used and freed as soon as it is complete.

So that the gradients of all parameters never exist together. To everybody else it is the optimizer
that it was: the same class, the same parameter groups, the same state. What a learning-rate
scheduler, `load_state_dict` or `add_param_group` changes there is what the next update uses, and a
checkpoint of it is a checkpoint of that class.

Not with gradient accumulation, clipping, a GradScaler or DistributedDataParallel: each needs a
gradient that is gone. Source:
https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class SteppedInBackward(torch.optim.Optimizer):
    """What `step_in_backward` puts before the class of an optimizer.

    `step` updates what backward has not reached.
    """

    _single: torch.optim.Optimizer
    """An optimizer of the original class, shown one parameter at a time, with the group and the
    state it has here."""
    _group_index: dict[Tensor, int]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in self._group_index:
            if parameter.grad is not None:
                self._update(parameter)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._follow(len(self.param_groups) - 1)

    def _follow(self, group_index: int) -> None:
        """Updates the parameters of a group from now on whenever their gradients are complete."""
        for parameter in self.param_groups[group_index]["params"]:
            self._group_index[parameter] = group_index
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._update)

    def _update(self, parameter: Tensor) -> None:
        group = self.param_groups[self._group_index[parameter]]
        alone = {**group, "params": [parameter]}
        self._single.param_groups, self._single.state = [alone], self.state
        self._single.step()
        parameter.grad = None
        changed = [
            name for name in alone if name != "params" and alone[name] is not group.get(name)
        ]
        if changed:
            # Updated for each parameter in turn, it would count as many steps as there are
            # parameters.
            raise RuntimeError(
                f"{type(self._single).__name__} keeps {', '.join(changed)} in its parameter groups from step to step, "
                "for all parameters together"
            )


def step_in_backward(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Makes `optimizer`, which has not stepped yet, step during the backward pass, and returns it."""
    kind = type(optimizer)
    single = kind.__new__(kind)
    single.__dict__.update(optimizer.__dict__)
    # Hooks on its step stay with the optimizer that has them.
    single._optimizer_step_pre_hooks, single._optimizer_step_post_hooks = (
        OrderedDict(),
        OrderedDict(),
    )
    optimizer.__class__ = type("SteppedInBackward", (SteppedInBackward, kind), {})
    assert isinstance(optimizer, SteppedInBackward)
    optimizer._patch_step_function()  # calls the hooks on a step, as the classes of torch do
    optimizer._single, optimizer._group_index = single, {}
    for index in range(len(optimizer.param_groups)):
        optimizer._follow(index)
    return optimizer
