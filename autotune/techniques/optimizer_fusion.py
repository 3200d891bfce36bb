"""Optimizer fusion: how the parameters are updated.

| value | how | memory |
|---|---|---|
| none | a loop over the parameters (`foreach=False`) | temporaries of one parameter |
| foreach | batched over all parameters | temporaries up to the size of all parameters |
| kernel | one kernel (`fused=True`), where the optimizer has it | no temporaries |
| backward | in the backward pass (`step_in_backward.py`) | frees each gradient at once |

If the workload specifies it, gradients are clipped by the norm of all of them together
(arXiv:1211.5063), which is not possible with a step in backward.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from autotune.errors import first_line_of
from autotune.shipped.learning_rate import set_learning_rate
from autotune.shipped.quantized import tensors_behind
from autotune.shipped.step_in_backward import step_in_backward
from autotune.shipped.stochastic_rounding import StochasticallyRounded
from autotune.spec.config import OptimizerFusion
from autotune.spec.optimizers import OPTIMIZERS, Optimizer
from autotune.system.build_tools import why_no_compilation
from autotune.techniques.optimizer import Parameters, make_optimizer
from autotune.techniques.tensor_parallel import TensorParallel


class Updater(Protocol):
    """Updates the parameters once per global batch."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer whose parameter groups and state the updates use."""

    def set_learning_rate(self, learning_rate: float) -> None: ...

    def backward(self, loss: Tensor) -> None:
        """Runs the backward pass of a micro batch."""

    def step(self) -> None:
        """Must be called after the last backward of a global batch; frees all gradients."""

    def state(self) -> Iterator[Tensor]:
        """Yields every tensor of optimizer state."""


class UpdateAfterBackward:
    """Updates all parameters after the backward passes of a global batch."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        *,
        gradient_clipping: float | None = None,
        tensor_parallel: TensorParallel | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._scaler = scaler
        self._gradient_clipping = gradient_clipping
        self._tensor_parallel = tensor_parallel

    def set_learning_rate(self, learning_rate: float) -> None:
        set_learning_rate(self.optimizer, learning_rate)

    def backward(self, loss: Tensor) -> None:
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        loss.backward()

    def step(self) -> None:
        if self._tensor_parallel is not None:
            self._tensor_parallel.add_up_gradients()
        if self._gradient_clipping is not None:
            self._clip(self._gradient_clipping)
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def _clip(self, largest_norm: float) -> None:
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        parameters = [
            parameter for group in self.optimizer.param_groups for parameter in group["params"]
        ]
        # With a loop, as in the update without fusion: a batched version would allocate as much as
        # all gradients again.
        if self._tensor_parallel is None:
            nn.utils.clip_grad_norm_(parameters, largest_norm, foreach=False)
        else:
            norm = self._tensor_parallel.total_norm(parameters)
            nn.utils.clip_grads_with_norm_(parameters, largest_norm, norm, foreach=False)

    def state(self) -> Iterator[Tensor]:
        return state_of(self.optimizer)


class UpdateInBackward:
    """Updates each parameter as soon as its gradient is complete, and frees the gradient."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = step_in_backward(optimizer)

    def set_learning_rate(self, learning_rate: float) -> None:
        set_learning_rate(self.optimizer, learning_rate)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()

    def state(self) -> Iterator[Tensor]:
        return state_of(self.optimizer)


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """Which optimizer updates the parameters, with which fusion and rounding."""

    optimizer: Optimizer
    fusion: OptimizerFusion
    learning_rate: float
    rounds_stochastically: bool = False
    seed: int = 0
    """Seed of the noise of stochastic rounding."""

    def make_optimizer(self, parameters: Parameters) -> torch.optim.Optimizer:
        """Returns the optimizer for `parameters`."""
        if not self.rounds_stochastically:
            return self._make_plain_optimizer(parameters)
        return StochasticallyRounded(
            parameters,
            self._make_plain_optimizer,
            learning_rate=self.learning_rate,
            seed=self.seed,
        )

    def _make_plain_optimizer(self, parameters: Parameters) -> torch.optim.Optimizer:
        return make_optimizer(
            parameters, self.optimizer, fusion=self.fusion, learning_rate=self.learning_rate
        )


def make_updater(
    parameters: Parameters,
    rule: UpdateRule,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    gradient_clipping: float | None = None,
    tensor_parallel: TensorParallel | None = None,
) -> Updater:
    """Returns the updater of `parameters`, by `optimizer` or else by that of the rule.

    `gradient_clipping` is the largest norm of all gradients together; it cannot be combined with a
    step in backward.
    """
    if optimizer is None:
        optimizer = rule.make_optimizer(parameters)
    if rule.fusion == "backward":
        assert gradient_clipping is None
        if tensor_parallel is not None:
            tensor_parallel.add_up_in_backward()
        return UpdateInBackward(optimizer)
    return UpdateAfterBackward(
        optimizer, scaler, gradient_clipping=gradient_clipping, tensor_parallel=tensor_parallel
    )


def unavailable(
    fusion: OptimizerFusion, optimizer: Optimizer, *, device: torch.device
) -> str | None:
    """Returns why this update does not work on `device`; None if it does.

    It is found by one update of a small parameter.
    """
    # 4,096 elements: with fewer, 8-bit AdamW stores its state as plain AdamW does.
    parameter = nn.Parameter(torch.ones(64, 64, device=device))
    if OPTIMIZERS[optimizer].compiles_update and (reason := why_no_compilation(device.type)):
        return reason
    try:
        updater = make_updater(
            [parameter], UpdateRule(optimizer=optimizer, fusion=fusion, learning_rate=0.1)
        )
        parameter.square().sum().backward()
        updater.step()
    except (RuntimeError, ValueError, TypeError, ImportError, AttributeError) as error:
        return first_line_of(error)
    return None


def state_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yields every tensor of an optimizer's state on this device."""
    holder = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer's own part
    for state in holder.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                yield from tensors_behind(value)
