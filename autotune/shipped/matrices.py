"""Optimizers that update the matrices in the blocks of a model by a rule of their own.

Embeddings, the head, norms and biases are left to AdamW (arXiv:1711.05101), as Muon's and APOLLO's
authors do (https://kellerjordan.github.io/posts/muon, arXiv:2502.16982, arXiv:2412.05270).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autotune.shipped.blocks import can_be_called, find_blocks, read_by


def matrices_apart(model: nn.Module, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the trained parameters in two groups, of which the first has `settings` as well.

    It has the matrices in the blocks, and stacks of matrices [experts, rows, columns], and is
    marked as `are_matrices`. A group that would be empty is left out.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = _matrices_in_blocks(model)
    own = [parameter for parameter in trained if parameter in matrices]
    others = [parameter for parameter in trained if parameter not in matrices]
    groups = [{"params": own, "are_matrices": True, **settings}, {"params": others}]
    return [group for group in groups if group["params"]]


def _matrices_in_blocks(model: nn.Module) -> set[nn.Parameter]:
    found = find_blocks(model)
    modules = () if found is None else found.blocks.modules()
    return {
        matrix
        for module in modules
        if can_be_called(module) and not isinstance(module, nn.Embedding | nn.modules.conv._ConvNd)
        for matrix in _matrices_of(module)
    }


def _matrices_of(module: nn.Module) -> list[nn.Parameter]:
    """Returns the matrices, and stacks of them, that the forward of a module computes with.

    What has two dimensions beside a stack [experts, rows, columns] and is [experts, rows] or
    [experts, columns] is one of vectors, such as the biases of experts.
    """
    own = [one for holder in read_by(module) for one in holder.parameters(recurse=False)]
    stacks = [parameter for parameter in own if parameter.dim() == 3]
    of_experts = {(len(stack), size) for stack in stacks for size in stack.shape[1:]}
    of_experts = {shape for shape in of_experts if shape[0] > 1}
    matrices = [one for one in own if one.dim() == 2 and tuple(one.shape) not in of_experts]
    return stacks + matrices


class MatricesApart(torch.optim.Optimizer):
    """Updates the groups that `are_matrices` by `update_matrix`, and others by AdamW.

    Of AdamW the state of a parameter is `step` (a number), `exp_avg` and `exp_avg_sq`.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**settings, "are_matrices": False})

    def update_matrix(
        self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Updates a matrix [rows, columns], or a stack of them, after the decay of weights."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            update = self.update_matrix if group["are_matrices"] else _update_by_adamw
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    update(parameter, parameter.grad, self.state[parameter], group)
        return loss


def _update_by_adamw(
    weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
) -> None:
    beta1, beta2 = group["betas"]
    if not state:
        state["step"] = 0
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
    state["step"] += 1
    average = state["exp_avg"].lerp_(gradient, 1 - beta1)
    square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (square / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
    weight.addcdiv_(average, denominator, value=-group["lr"] / (1 - beta1 ** state["step"]))
