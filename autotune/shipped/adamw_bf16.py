"""AdamW (arXiv:1711.05101) whose two moments are in bf16, whatever the dtype of the weights.

Half of the state of AdamW in float32, where torch.optim.AdamW has moments in the dtype of the
weights. Everything is computed in float32, for a few million numbers at a time, and a moment is
stored with stochastic rounding (arXiv:2010.06192): in bf16 a second moment that forgets a
thousandth of itself at every step would never change if it were rounded to the nearest number, as
AnyPrecisionAdamW (https://github.com/pytorch/torchdistx) rounds it. DeepSeek-V3 (arXiv:2412.19437,
section 3.3.3) has both moments in bf16 as well, and forgets a twentieth (beta2 = 0.95).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from autotune.shipped.stochastic_rounding import round_to_bf16

_MOMENTS = ("exp_avg", "exp_avg_sq")
NUMBERS_AT_ONCE = 1 << 22
"""Size of the temporaries of an update, each of 16 MiB."""


class AdamWBf16(torch.optim.Optimizer):
    """Updates one parameter after the other.

    The state of a parameter is `step` (a number), `exp_avg` and `exp_avg_sq`. The noise of rounding
    follows from the step and the shape of a parameter, so that neither the order of the parameters
    nor a resumed training changes it, and so that copies of a parameter stay the same.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, self.state[parameter], group)
        return loss


def _update(parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not state:
        state["step"] = 0
        for name in _MOMENTS:
            state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
    for name in _MOMENTS:  # `load_state_dict` gives them the dtype of the weights
        state[name] = state[name].to(torch.bfloat16)
    state["step"] += 1
    tensors = [parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]]
    # The part of this device, of a parameter that FSDP2 divides.
    parts = [torch.atleast_1d(getattr(tensor, "_local_tensor", tensor)) for tensor in tensors]
    generator = _seeded(parts[0], state["step"])
    row_numbers = max(1, parts[0][:1].numel())
    rows = max(1, NUMBERS_AT_ONCE // row_numbers)
    for weight, gradient, average, square in zip(
        *(part.split(rows) for part in parts), strict=True
    ):
        _update_part(weight, gradient.float(), average, square, state["step"], group, generator)


def _seeded(part: Tensor, step: int) -> torch.Generator | None:
    if isinstance(part, FakeTensor):
        return None  # its device may not exist on this machine
    return torch.Generator(part.device).manual_seed(hash((step, *part.shape)) % 2**63)


def _update_part(
    weight: Tensor,
    gradient: Tensor,
    average: Tensor,
    square: Tensor,
    step: int,
    group: dict[str, Any],
    generator: torch.Generator | None,
) -> None:
    beta1, beta2 = group["betas"]
    rate = group["lr"]
    new_square = square.float().lerp_(gradient.square(), 1 - beta2)
    square.copy_(round_to_bf16(new_square, generator=generator))
    denominator = new_square.div_(1 - beta2**step).sqrt_().add_(group["eps"])
    new_average = average.float().lerp_(gradient, 1 - beta1)
    exact = weight.float()  # the weight itself where it is float32
    exact.mul_(1 - rate * group["weight_decay"])
    exact.addcdiv_(new_average, denominator, value=-rate / (1 - beta1**step))
    if exact is not weight:
        weight.copy_(exact)
    average.copy_(round_to_bf16(new_average, generator=generator))
