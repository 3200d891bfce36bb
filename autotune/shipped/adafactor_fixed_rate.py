"""Adafactor (arXiv:1804.04235) with a fixed learning rate, as it is commonly used.

That is, without relative steps and without scaling by the weight. The second moment of a matrix is
stored as the means of its rows and of its columns, that of a vector in full, in the dtype of the
parameter. The update is computed in float32, with temporaries for one parameter, and rounded to the
parameter's dtype once, to nearest. torch.optim.Adafactor is a different algorithm: its step is
relative to the size of the weight. Adafactor in transformers has the same rule without a limit on
beta2; transformers is not a dependency of autotune.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

WEIGHT_DECAY = 0.01
"""Decoupled (arXiv:1711.05101): the weight shrinks by the learning rate times this at every step.
"""
DECAY_RATE = -0.8
"""Step t forgets 1 - beta2 = t ** DECAY_RATE of the second moment, section 7.2 of the paper."""
LARGEST_BETA2 = 0.999
CLIP_THRESHOLD = 1.0
"""Largest root mean square of an update before the learning rate, section 6 of the paper."""
SQUARE_EPS = 1e-30
"""Added to squared gradients. The paper's second eps, 1e-3, belongs to the scaling by the weight,
which is left out here."""


class AdafactorFixedRate(torch.optim.Optimizer):
    """Updates one parameter after the other.

    The state of a parameter is `step` (a number), and `row` and `column`, or `square`.
    """

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, self.state[parameter], learning_rate=group["lr"])
        return loss


def _update(parameter: Tensor, state: dict[str, Any], *, learning_rate: float) -> None:
    if not state:
        state.update(_initial_state(parameter))
    state["step"] += 1
    assert parameter.grad is not None
    gradient = parameter.grad.float()
    update = _inverse_root(gradient, state).mul_(gradient)
    root_mean_square = update.norm() / update.numel() ** 0.5
    update.div_((root_mean_square / CLIP_THRESHOLD).clamp_(min=1.0))
    weight = parameter.float()  # the parameter itself where it is float32
    weight.mul_(1 - learning_rate * WEIGHT_DECAY).sub_(update, alpha=learning_rate)
    if weight is not parameter:
        parameter.copy_(weight)


def _initial_state(parameter: Tensor) -> dict[str, Any]:
    """Returns zeros for the second moment of a parameter.

    For a matrix [..., rows, columns] that is `row` [..., rows] and `column` [..., columns],
    otherwise `square` in the shape of the parameter.
    """
    if parameter.dim() < 2:
        square = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        return {"step": 0, "square": square}
    return {
        "step": 0,
        "row": torch.zeros_like(parameter[..., 0]),
        "column": torch.zeros_like(parameter[..., 0, :]),
    }


def _inverse_root(gradient: Tensor, state: dict[str, Any]) -> Tensor:
    """Updates the second moment with a float32 gradient; returns 1 over its square root, new."""
    weight_of_new = max(state["step"] ** DECAY_RATE, 1 - LARGEST_BETA2)
    square = gradient.square().add_(SQUARE_EPS)
    if "square" in state:
        return _blend(state, "square", square, weight_of_new).rsqrt()
    row = _blend(state, "row", square.mean(dim=-1), weight_of_new)
    column = _blend(state, "column", square.mean(dim=-2), weight_of_new)
    # Roots before the product: row times column would underflow to zero where both are near
    # SQUARE_EPS.
    row = (row / row.mean(dim=-1, keepdim=True)).rsqrt_()
    return row.unsqueeze(-1) * column.rsqrt().unsqueeze(-2)


def _blend(state: dict[str, Any], name: str, new: Tensor, weight_of_new: float) -> Tensor:
    """Updates a moving average in the state; returns it unrounded, in float32."""
    moment: Tensor = state[name]
    blended = torch.lerp(moment.float(), new, weight_of_new)
    moment.copy_(blended)
    return blended
