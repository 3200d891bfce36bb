"""Optimizer fusion: how the update runs.

| value | how | memory |
|---|---|---|
| none | a loop over the parameters (`foreach=False`) | temporaries of one parameter |
| foreach | batched over all parameters | temporaries up to the size of all parameters |
| kernel | one kernel (`fused=True`), where the optimizer has it | no temporaries |
| backward | in the hook of each gradient, which is freed at once | never all gradients together |

Source: https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from autotune.config import Optimizer, OptimizerFusion
from autotune.techniques.optimizer import make_optimizer


class Updater(Protocol):
    """Updates the parameters once a global batch, whichever way."""

    def set_learning_rate(self, learning_rate: float) -> None: ...

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""

    def step(self) -> None:
        """To be called after the last backward of a global batch; leaves no gradients behind."""

    def state(self) -> Iterator[Tensor]:
        """Every tensor of optimizer state."""


class UpdateAfterBackward:
    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        self._optimizer = optimizer
        self._scaler = scaler

    def set_learning_rate(self, learning_rate: float) -> None:
        _set_learning_rate(self._optimizer, learning_rate)

    def scale(self, loss: Tensor) -> Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)

    def step(self) -> None:
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> Iterator[Tensor]:
        return _state_of([self._optimizer])


class UpdateInBackward:
    """One optimizer a parameter, stepped and its gradient freed as soon as that gradient is complete."""

    def __init__(self, optimizers: dict[nn.Parameter, torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(self._update)

    def _update(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._optimizers[parameter].step()
        self._optimizers[parameter].zero_grad(set_to_none=True)

    def set_learning_rate(self, learning_rate: float) -> None:
        for optimizer in self._optimizers.values():
            _set_learning_rate(optimizer, learning_rate)

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def step(self) -> None:
        pass

    def state(self) -> Iterator[Tensor]:
        return _state_of(list(self._optimizers.values()))


def make_updater(
    parameters: Sequence[nn.Parameter],
    optimizer: Optimizer,
    *,
    fusion: OptimizerFusion,
    learning_rate: float,
    scaler: torch.amp.GradScaler | None,
) -> Updater:
    if fusion == "backward":
        return UpdateInBackward(
            {p: make_optimizer([p], optimizer, fusion=fusion, learning_rate=learning_rate) for p in parameters}
        )
    return UpdateAfterBackward(
        make_optimizer(parameters, optimizer, fusion=fusion, learning_rate=learning_rate), scaler
    )


def unavailable(fusion: OptimizerFusion, optimizer: Optimizer, *, device: torch.device) -> str | None:
    """Why this update does not work on `device`, found by one update of a small parameter; None if it does."""
    parameter = nn.Parameter(torch.ones(8, 8, device=device))
    try:
        updater = make_updater([parameter], optimizer, fusion=fusion, learning_rate=0.1, scaler=None)
        parameter.square().sum().backward()
        updater.step()
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error).splitlines()[0]
    return None


def _set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def _state_of(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
