"""Stochastic rounding of an update to bf16: up or down with the probability that makes the expectation exact.

A weight of 1 in bf16 has neighbours 0.004 below and 0.008 above; to nearest, every smaller update
is lost. Rounded stochastically, an update of a hundredth of that distance arrives once in a hundred
steps, so that weights in bf16 learn almost as in float32. Saves what bf16-true saves; costs the
conversions, and a float32 copy of one parameter with its gradient and state at a time. State is
rounded alike: a second moment that moves by a thousandth would stand still. Source:
arXiv:2010.06192
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_BITS_DROPPED = 16
"""float32's mantissa has so many more than bf16's, whose bits are otherwise the same."""


def round_to_bf16(values: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """float32 `values` in bf16; infinities and NaN stay what they are."""
    noise = torch.randint(
        0,
        1 << _BITS_DROPPED,
        values.shape,
        dtype=torch.int32,
        device=values.device,
        generator=generator,
    )
    # Added to the bits, the noise carries into bf16's mantissa as often as the dropped bits are
    # worth.
    rounded = (
        noise.add_(values.view(torch.int32)).bitwise_and_(-1 << _BITS_DROPPED).view(torch.float32)
    )
    # The bits of a NaN would carry into the sign and come out as zero.
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


class StochasticallyRounded(torch.optim.Optimizer):
    """Any optimizer over bf16 parameters, one at a time: computed in float32, then weight and state rounded.

    The noise has a generator of its own, so that dropout sees the same random numbers as without,
    and is seeded anew for every parameter and step, so that it is the same in whatever order the
    parameters come.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        make_optimizer: MakeOptimizer,
        *,
        learning_rate: float,
        seed: int,
    ) -> None:
        self._index_of: dict[Tensor, int] = {}
        super().__init__(parameters, {"lr": learning_rate})
        self._inner = make_optimizer([nn.Parameter(torch.zeros(1))])
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
            self._inner.param_groups[0]["lr"] = group["lr"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter)
        return None

    def _update(self, parameter: Tensor) -> None:
        kept = self.state[parameter]
        steps_before = kept.pop(_STEPS, 0)
        generator = self._seeded(parameter, steps_before)
        exact = nn.Parameter(parameter.float())
        assert parameter.grad is not None
        exact.grad = parameter.grad.float()
        self._inner.param_groups[0]["params"] = [exact]
        self._inner.state.clear()
        self._inner.state[exact] = {name: _widened(value) for name, value in kept.items()}
        self._inner.step()
        state = self._inner.state.pop(exact)
        self._inner.param_groups[0]["params"] = []
        parameter.copy_(round_to_bf16(exact.detach(), generator=generator))
        for name, value in state.items():
            if not _is_rounded(value):
                kept[name] = value
            elif name in kept:
                # In place, as torch's own optimizers do: whoever holds the state holds no second
                # one.
                kept[name].copy_(round_to_bf16(value, generator=generator))
            else:
                kept[name] = round_to_bf16(value, generator=generator)
        kept[_STEPS] = steps_before + 1

    def _seeded(self, parameter: Tensor, steps_before: int) -> torch.Generator | None:
        if isinstance(parameter, FakeTensor):
            return None  # of a device that need not be there
        generator = self._generators.setdefault(parameter.device, torch.Generator(parameter.device))
        # Far apart for neighbours: a hash of the three numbers, the same in every process.
        return generator.manual_seed(
            hash((self._seed, steps_before, self._index_of[parameter])) % 2**63
        )


_STEPS = "rounded_steps"
"""In a parameter's state: how many updates were rounded, so that a training that is resumed goes on
with the noise."""


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def _is_rounded(value: Any) -> bool:
    """Whether it is kept in bf16. Numbers, such as the count of steps, stay what they are."""
    return isinstance(value, Tensor) and value.dtype == torch.float32 and value.dim() > 0
