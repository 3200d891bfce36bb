"""Makes an optimizer step during the backward pass, using and freeing each gradient at once.

So the gradients of all parameters never exist together. For all other code the optimizer is what it
was: an instance of the same class, with the same parameter groups and the same state. The next
update uses what a learning-rate scheduler, `load_state_dict` or `add_param_group` changes there,
and a checkpoint, a copy or a pickle of it is one of that class.

Cannot be combined with gradient accumulation, clipping, a GradScaler, DistributedDataParallel or a
hook that runs before a step: each needs a gradient that has been freed. Source:
https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


class SteppedInBackward(torch.optim.Optimizer):
    """The class that `step_in_backward` adds as the first base class of an optimizer.

    `step` updates the parameters that still have a gradient after the backward pass.
    """

    _single: torch.optim.Optimizer
    """An optimizer of the original class, which is given one parameter at a time, with its group
    and state from this optimizer."""
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

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        raise RuntimeError(
            "a hook cannot run before the step of an optimizer that steps in the backward pass: "
            "its updates are made by then"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (type(self._single),), self.__getstate__()

    def _follow(self, group_index: int) -> None:
        """From now on, updates each parameter of a group when its gradient is complete."""
        for parameter in self.param_groups[group_index]["params"]:
            self._group_index[parameter] = group_index
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._update)

    def _update(self, parameter: Tensor) -> None:
        group = self.param_groups[self._group_index[parameter]]
        alone = {**group, "params": [parameter]}
        self._single.param_groups = [alone]
        self._single.state = self.state
        self._single.step()
        parameter.grad = None
        changed = [
            name for name in alone if name != "params" and alone[name] is not group.get(name)
        ]
        if changed:
            # Being updated for each parameter, it would count as many steps as there are
            # parameters.
            raise RuntimeError(
                f"{type(self._single).__name__} keeps {', '.join(changed)} in its parameter groups "
                "from step to step, for all parameters together"
            )


def step_in_backward(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Makes `optimizer` step during the backward pass; returns it."""
    kind = type(optimizer)
    single = kind.__new__(kind)
    single.__dict__.update(optimizer.__dict__)
    single.__dict__.pop("step", None)  # set by a learning-rate scheduler, for `optimizer` itself
    # Hooks on `step` must run for the optimizer itself only.
    single._optimizer_step_pre_hooks = OrderedDict()
    single._optimizer_step_post_hooks = OrderedDict()
    optimizer.__class__ = type("SteppedInBackward", (SteppedInBackward, kind), {})
    assert isinstance(optimizer, SteppedInBackward)
    optimizer._patch_step_function()  # makes `step` call its hooks, as in the classes of torch
    optimizer._single = single
    optimizer._group_index = {}
    for index in range(len(optimizer.param_groups)):
        optimizer._follow(index)
    return optimizer
