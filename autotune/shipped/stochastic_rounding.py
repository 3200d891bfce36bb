"""Stochastic rounding of an update to bf16: up or down, so that the expected value is exact.

A weight of 1 in bf16 has neighbours 0.004 below and 0.008 above; rounding to nearest loses every
update of less than half of that distance. With stochastic rounding an update of a hundredth of the
distance takes effect once in a hundred steps, so that weights in bf16 learn almost as in float32.
Saves what bf16-true saves; costs the conversions, and a float32 copy of one parameter with its
gradient and state at a time. State is rounded in the same way: a second moment that changes by a
thousandth would otherwise never change. Source: arXiv:2010.06192
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_BITS_DROPPED = 16
"""Bits by which float32's mantissa is longer than bf16's. All other bits are the same."""


def round_to_bf16(values: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Returns float32 `values` stochastically rounded to bf16; keeps infinities and NaN."""
    noise = torch.randint(
        0,
        1 << _BITS_DROPPED,
        values.shape,
        dtype=torch.int32,
        device=values.device,
        generator=generator,
    )
    # Adding the noise to the bits carries into bf16's mantissa with the probability that the
    # dropped bits stand for.
    rounded = (
        noise.add_(values.view(torch.int32)).bitwise_and_(-1 << _BITS_DROPPED).view(torch.float32)
    )
    # The bits of a NaN could carry into the sign and become zero.
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


class StochasticallyRounded(torch.optim.Optimizer):
    """Any optimizer for bf16 parameters, with stochastic rounding of weights and state.

    Each parameter is updated in float32 by an inner optimizer, one after the other. The noise has a
    separate generator, so that it does not change the random numbers of dropout. The generator is
    seeded for every parameter and step, so that the noise does not depend on the order of the
    parameters.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        make_optimizer: MakeOptimizer,
        *,
        learning_rate: float,
        seed: int,
    ) -> None:
        self._index_of: dict[Tensor, int] = {}
        super().__init__(parameters, {"lr": learning_rate})
        self._inner = make_optimizer([nn.Parameter(torch.zeros(1))])
        self._settings = self._inner.param_groups[0]
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            self._index_of[parameter] = len(self._index_of)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            self._inner.param_groups = [{**self._settings, **group, "params": []}]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter)
        return None

    def _update(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        steps_before = state.pop(_STEPS, 0)
        generator = self._seeded(parameter, steps_before)
        exact = nn.Parameter(parameter.float())
        assert parameter.grad is not None
        exact.grad = parameter.grad.float()
        self._inner.param_groups[0]["params"] = [exact]
        self._inner.state.clear()
        self._inner.state[exact] = {name: _widened(value) for name, value in state.items()}
        self._inner.step()
        new_state = self._inner.state.pop(exact)
        self._inner.param_groups[0]["params"] = []
        parameter.copy_(round_to_bf16(exact.detach(), generator=generator))
        for name, value in new_state.items():
            if not _is_rounded(value):
                state[name] = value
            elif name in state:
                # In place, as in torch's optimizers: other references to the state then do not keep
                # a second copy alive.
                state[name].copy_(round_to_bf16(value, generator=generator))
            else:
                state[name] = round_to_bf16(value, generator=generator)
        state[_STEPS] = steps_before + 1

    def _seeded(self, parameter: Tensor, steps_before: int) -> torch.Generator | None:
        if isinstance(parameter, FakeTensor):
            return None  # its device may not exist on this machine
        generator = self._generators.setdefault(parameter.device, torch.Generator(parameter.device))
        # A hash, so that similar numbers give very different seeds. For integers it is the same in
        # every process.
        seed = hash((self._seed, steps_before, self._index_of[parameter])) % 2**63
        return generator.manual_seed(seed)


_STEPS = "rounded_steps"
"""Key in a parameter's state: the number of rounded updates. A resumed training continues the noise
with it."""


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype == torch.bfloat16:
        return value.float()
    return value


def _is_rounded(value: Any) -> bool:
    """Returns whether a value is stored in bf16. Numbers, such as the count of steps, are not."""
    return isinstance(value, Tensor) and value.dtype == torch.float32 and value.dim() > 0
