"""Offload: what of a model's memory is on the host between its uses.

| value | on the host | costs |
|---|---|---|
| none | | |
| optimizer | the optimizer's state, a copy of the weights | gradients there, new weights back |
| all | weights, gradients, the optimizer's state | weights to the device twice a micro batch too |
| frozen | frozen weights of blocks, beside adapters | these to the device twice a micro batch |

With optimizer and all the host's processors update the weights, which is slow without
optimizer_fusion kernel. The host needs memory for all that leaves the device, most of it pinned.

`optimizer` is torchao's CPUOffloadOptimizer, for one device. It copies each gradient to the host
while the backward pass goes on. Weights with fewer than 4,096 elements are updated on the device.
With optimizer_fusion backward each gradient leaves the device as soon as it has been copied, and
the update is still after the backward pass. A gradient is copied when it is complete for this
device and this micro batch, so nothing can change it later: neither clipping nor a GradScaler.

`all` is FSDP2 with its CPUOffloadPolicy, on a mesh of a single device where a trial has one. A
block's weights are on the device during its forward and its backward pass.

`frozen` is our own (`shipped/frozen_on_host.py`), like axolotl's layer_offloading: while a block
runs, forward or backward, its weights and those of the next are on the device. Embeddings, the last
norm and the head stay there, as do weights that several modules share, adapters, and scales of nf4.
What autocast makes of a weight is an activation: it is kept for the backward pass unless the block
is recomputed, so base_weights are best in 16 bits or fewer.

All need a device with memory of its own. Sources:
https://github.com/axolotl-ai-cloud/axolotl/blob/main/src/axolotl/core/trainers/mixins/layer_offloading.py,
https://github.com/pytorch/ao/blob/main/torchao/optim/cpu_offload.py,
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autotune.errors import IllegalConfiguration
from autotune.techniques.optimizer import Parameters
from autotune.techniques.optimizer_fusion import UpdateRule

SMALLEST_ELEMENTS = 4096
"""Weights with fewer elements are updated on the device. It is torchao's default."""


class StateOnHost(torch.optim.Optimizer):
    """An optimizer of the weights on the device, whose state and update are on the host."""

    def __init__(self, parameters: Parameters, rule: UpdateRule) -> None:
        super().__init__(parameters, {"lr": rule.learning_rate})
        self._rule = rule
        self._on_host = optimizer_on_host(
            self.param_groups[0]["params"],
            make_optimizer=lambda groups, **_: rule.make_optimizer(groups),
            frees_gradients=rule.fusion == "backward",
        )

    @property
    def gradients_on_host(self) -> Mapping[Tensor, Tensor]:
        """The copy of each weight whose gradient is no longer on the device after backward."""
        if self._rule.fusion != "backward":
            return {}
        copies: Mapping[Tensor, Tensor] = self._on_host.param_d2h_map
        return copies

    @property
    def part_on_device(self) -> torch.optim.Optimizer | None:
        """The optimizer of the small weights, which has the same parameters for them."""
        part: torch.optim.Optimizer | None = self._on_host.d_opt
        return part

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        assert closure is None
        for group in self._on_host.param_groups:
            group["lr"] = self.param_groups[0]["lr"]
        self._on_host.step()
        if not self.state:
            self._find_state()
        return None

    def _find_state(self) -> None:
        for weight, copy in self._on_host.param_d2h_map.items():
            if weight in self._on_host.optim_dict:
                self.state[weight] = self._on_host.optim_dict[weight].state[copy]
        if self.part_on_device is not None:
            self.state.update(self.part_on_device.state)


def optimizer_on_host(
    parameters: Sequence[nn.Parameter], *, make_optimizer: Any, frees_gradients: bool
) -> Any:
    """Returns torchao's optimizer. Raises IllegalConfiguration where there is no such device."""
    if not torch.cuda.is_available():
        raise IllegalConfiguration(
            "offload optimizer cannot be applied: the optimizer's state is in the host's memory "
            "already",
            hint="use offload none",
        )
    # An extra.
    from torchao.optim import CPUOffloadOptimizer  # noqa: PLC0415

    return CPUOffloadOptimizer(
        parameters,
        optimizer_class=make_optimizer,
        offload_gradients=frees_gradients,
        minimal_size=SMALLEST_ELEMENTS,
    )


def rule_after_backward(rule: UpdateRule) -> UpdateRule:
    """Returns the rule of an update after the backward pass, as that on the host always is."""
    return replace(rule, fusion="none") if rule.fusion == "backward" else rule
