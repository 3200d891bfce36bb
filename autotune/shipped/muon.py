"""Muon (https://kellerjordan.github.io/posts/muon) for matrices, with AdamW for the other weights.

The update of a matrix is its momentum, brought close to the nearest orthogonal matrix by five
Newton-Schulz iterations. So a matrix has one number of state for each weight, where AdamW has two.
As in Moonlight (arXiv:2502.16982, section 2.2) the update is scaled by 0.2 times the root of the
longer side, with which it is as large as one of AdamW, and has the same rate and weight decay:
torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"`. That class has no stacks of matrices, as
experts are, and no parameters of other shapes.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from autotune.shipped.matrices import MatricesApart

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the polynomial of a Newton-Schulz iteration, chosen to converge fast from small values."""
ITERATIONS = 5
SIZE_OF_ADAMW = 0.2
"""Root mean square of an update of AdamW before the learning rate."""


class MuonWithAdamW(MatricesApart):
    """Updates matrices by Muon, and others by AdamW. The state of a matrix is `momentum_buffer`."""

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def update_matrix(
        self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        momentum = group["momentum"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = orthogonalized(gradient.lerp(average, momentum))
        size = SIZE_OF_ADAMW * max(weight.shape[-2:]) ** 0.5
        weight.add_(update, alpha=-group["lr"] * size)


def orthogonalized(matrices: Tensor) -> Tensor:
    """Returns matrices [..., rows, columns] in bf16, with singular values near 1.

    They are between 0.7 and 1.2 where they are not tiny.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.bfloat16().reshape(-1, *matrices.shape[-2:])
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    x = x.mT if is_tall else x
    return x.reshape(matrices.shape)
