"""Optimizer fusion: how the update runs.

| value | how | memory |
|---|---|---|
| none | a loop over the parameters (`foreach=False`) | temporaries of one parameter |
| foreach | batched over all parameters | temporaries up to the size of all parameters |
| kernel | one kernel (`fused=True`), where the optimizer has it | no temporaries |
| backward | in the backward pass, each gradient freed at once (`step_in_backward.py`) | never all gradients together |

Gradients are clipped, where the workload says so, by the norm of all of them together
(arXiv:1211.5063), which a step in backward never has.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from autotune.build_tools import why_no_compilation
from autotune.spec.config import Optimizer, OptimizerFusion
from autotune.techniques.fp8 import torchao_is_missing
from autotune.techniques.optimizer import make_optimizer
from autotune.techniques.step_in_backward import step_in_backward
from autotune.techniques.stochastic_rounding import StochasticallyRounded


class Updater(Protocol):
    """Updates the parameters once a global batch, whichever way."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Whose parameter groups and state the updates use."""

    def set_learning_rate(self, learning_rate: float) -> None: ...

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""

    def step(self) -> None:
        """To be called after the last backward of a global batch; leaves no gradients behind."""

    def state(self) -> Iterator[Tensor]:
        """Every tensor of optimizer state."""


class UpdateAfterBackward:
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        *,
        gradient_clipping: float | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._scaler = scaler
        self._gradient_clipping = gradient_clipping

    def set_learning_rate(self, learning_rate: float) -> None:
        _set_learning_rate(self.optimizer, learning_rate)

    def scale(self, loss: Tensor) -> Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)

    def step(self) -> None:
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
        # A loop, as the update without fusion: batched, it would hold as much as all gradients once
        # more.
        nn.utils.clip_grad_norm_(parameters, largest_norm, foreach=False)

    def state(self) -> Iterator[Tensor]:
        return _state_of(self.optimizer)


class UpdateInBackward:
    """Each parameter is updated and its gradient freed as soon as that gradient is complete."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = step_in_backward(optimizer)

    def set_learning_rate(self, learning_rate: float) -> None:
        _set_learning_rate(self.optimizer, learning_rate)

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def step(self) -> None:
        self.optimizer.step()

    def state(self) -> Iterator[Tensor]:
        return _state_of(self.optimizer)


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """How parameters are updated, whenever that happens."""

    optimizer: Optimizer
    fusion: OptimizerFusion
    learning_rate: float
    rounds_stochastically: bool = False
    seed: int = 0
    """Of the noise of stochastic rounding."""

    def of(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        if not self.rounds_stochastically:
            return self._plain(parameters)
        return StochasticallyRounded(
            parameters, self._plain, learning_rate=self.learning_rate, seed=self.seed
        )

    def _plain(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return make_optimizer(
            parameters, self.optimizer, fusion=self.fusion, learning_rate=self.learning_rate
        )


def make_updater(
    parameters: Sequence[nn.Parameter],
    rule: UpdateRule,
    *,
    scaler: torch.amp.GradScaler | None = None,
    gradient_clipping: float | None = None,
) -> Updater:
    """`gradient_clipping`: largest norm of all gradients together; not with a step in backward."""
    if rule.fusion == "backward":
        assert gradient_clipping is None
        return UpdateInBackward(rule.of(parameters))
    return UpdateAfterBackward(rule.of(parameters), scaler, gradient_clipping=gradient_clipping)


def unavailable(
    fusion: OptimizerFusion, optimizer: Optimizer, *, device: torch.device
) -> str | None:
    """Why this update does not work on `device`, found by one update of a small parameter; None if it does."""
    # 4,096 numbers: with fewer, AdamW in 8 bits is plain AdamW.
    parameter = nn.Parameter(torch.ones(64, 64, device=device))
    if optimizer == "adamw-8bit" and (missing := torchao_is_missing()):
        return missing
    if optimizer == "adamw-8bit" and (
        missing := why_no_compilation(device.type)
    ):  # it compiles its update
        return missing
    try:
        updater = make_updater(
            [parameter], UpdateRule(optimizer=optimizer, fusion=fusion, learning_rate=0.1)
        )
        parameter.square().sum().backward()
        updater.step()
    except (RuntimeError, ValueError, TypeError, ImportError, AttributeError) as error:
        return str(error).splitlines()[0]
    return None


def _set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(
            group["lr"], Tensor
        ):  # torchao's: compiled code must not see a new number every step
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate


def _state_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                yield from _tensors_behind(value)


def _tensors_behind(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the numbers of a subclass, such as codes and scales; a plain tensor is its own."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _tensors_behind(getattr(tensor, name))
