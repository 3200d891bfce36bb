"""APOLLO (arXiv:2412.05270): the gradient of a matrix, scaled as AdamW would, with little state.

How much AdamW would change the size of each row or column of a gradient (`channel`), or of the
whole (`tensor`, APOLLO-Mini), is found in a random projection of the gradient, whose moments are
all of the state. Then the gradient itself is the update. Its norm may grow by 1 % in a step (the
limiter of Fira, arXiv:2410.01623). The projection is drawn anew every 200 steps, and from a seed at
every step, so that it is not kept. Other weights are updated by AdamW.

The rule is that of the package apollo-torch 1.0.3 of its authors, which keeps the projection, has
no stacks of matrices and may not be used commercially. In the limiter nothing waits for the device.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from autotune.shipped.matrices import MatricesApart

STEPS_OF_A_PROJECTION = 200
LARGEST_GROWTH = 1.01
SMALLEST_NORM = 1e-8
SMALLEST_PART = 4
"""A projection has at most this part of the shorter side of a matrix, as in the authors' trainings
of up to 1 B parameters."""


class Apollo(MatricesApart):
    """Updates matrices by APOLLO, and others by AdamW.

    A group of matrices has `rank`, `scale` (of the update; the paper has its root) and whether each
    row or column `scales_channels`. The state of a matrix is `step` (a number), the moments
    `exp_avg` and `exp_avg_sq` of the projection [rows, rank] or [rank, columns], and the `norm` of
    the last update.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def update_matrix(
        self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        beta1, beta2 = group["betas"]
        is_wide = weight.size(-2) < weight.size(-1)
        projection = _projection(weight, steps=state.get("step", 0), rank=group["rank"])
        projected = projection.mT @ gradient if is_wide else gradient @ projection
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(projected)
            state["exp_avg_sq"] = torch.zeros_like(projected)
        state["step"] += 1
        average = state["exp_avg"].lerp_(projected, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(projected, projected, value=1 - beta2)
        scaled = average / square.sqrt().add_(group["eps"])
        dims = (-2, -1) if not group["scales_channels"] else (-2,) if is_wide else (-1,)
        factor = _norm(scaled, dims) / (_norm(projected, dims) + SMALLEST_NORM)
        update = gradient * factor
        norm = update.norm()
        if "norm" in state:
            before = state["norm"]
            growth = norm / (before + SMALLEST_NORM)
            limiter = growth.clamp(min=LARGEST_GROWTH) / LARGEST_GROWTH
            # After a gradient of zeros, as of the first matrix of a new adapter, any growth is one.
            limiter = torch.where(before > 0, limiter, torch.ones_like(limiter))
            update.div_(limiter)
            state["norm"].copy_(norm / limiter)
        else:
            state["norm"] = norm
        corrected = (1 - beta2 ** state["step"]) ** 0.5 / (1 - beta1 ** state["step"])
        weight.add_(update, alpha=-group["lr"] * corrected * math.sqrt(group["scale"]))


class ApolloMini(Apollo):
    """APOLLO-Mini, a class of its own so that its name says which of them trains."""


def _projection(weight: Tensor, *, steps: int, rank: int) -> Tensor:
    """Returns a random matrix [shorter side, rank], the same for `STEPS_OF_A_PROJECTION` steps."""
    shorter = min(weight.shape[-2:])
    rank = max(1, min(rank, shorter // SMALLEST_PART))
    generator = None
    if not isinstance(weight, FakeTensor):  # its device may not exist on this machine
        seed = hash((steps // STEPS_OF_A_PROJECTION, *weight.shape)) % 2**63
        generator = torch.Generator(weight.device).manual_seed(seed)
    drawn = torch.randn(
        (shorter, rank), generator=generator, device=weight.device, dtype=weight.dtype
    )
    return drawn / math.sqrt(rank)


def _norm(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, dim=dims, keepdim=True)
    return norm
