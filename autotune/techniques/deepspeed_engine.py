"""Engine: whose code shares out a training among devices, and moves a part of it to the host.

| value | by |
|---|---|
| torch | what torch has for it (`sharding.py`, `offload.py`) |
| deepspeed | DeepSpeed's engine with a stage of ZeRO (arXiv:1910.02054, arXiv:2101.06840) |

What a device has with `deepspeed`:

| sharding | stage | weights | gradients | optimizer's state |
|---|---|---|---|---|
| none, ddp | 0 | all | all | all |
| zero1 | 1 | all | all | a part, and a copy of this part of the weights |
| zero2 | 2 | all | a part | the same |
| zero3 | 3 | a part, one layer at a time | a part | the same |

Stages 1 to 3 update a second copy of the weights, which pays where the first one has 16 bits; here
it has 32, as mixed precision is by `torch_autocast`. Offloading needs a stage even on one device: 1
for the optimizer's state, 3 for all.

The settings are those of an export to DeepSpeed, so that it trains as the trial has. The optimizer
is torch's, also on the host. So no C++ code has to be built: DeepSpeed would build an AdamW for the
host, and on a CPU an operator that only inference uses.

Sources: https://deepspeed.readthedocs.io/en/latest/zero3.html,
https://www.deepspeed.ai/docs/config-json/
"""

import gc
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from autotune.exporters.deepspeed_config import client_settings, engine_settings
from autotune.exporters.recipe import Recipe
from autotune.models.parts import ModelParts
from autotune.shipped.gloo import released
from autotune.spec.config import TrainingConfig
from autotune.spec.workload import Workload
from autotune.techniques.optimizer_fusion import UpdateRule, state_of
from autotune.techniques.sharding import DataParallel


class EngineOptimizer(torch.optim.Optimizer):
    """An optimizer of the model's weights, whose step is that of DeepSpeed's engine."""

    def __init__(
        self, engine: Any, parameters: Sequence[nn.Parameter], *, learning_rate: float
    ) -> None:
        super().__init__(parameters, {"lr": learning_rate})
        self._engine = engine
        self.optim: torch.optim.Optimizer = engine.basic_optimizer
        """The optimizer of what ZeRO makes of this device's part of the weights."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        assert closure is None
        for group in self.optim.param_groups:
            group["lr"] = self.param_groups[0]["lr"]
        self._engine.step()
        return None


class UpdateByEngine:
    """An `Updater` that is DeepSpeed's engine."""

    def __init__(
        self, engine: Any, optimizer: EngineOptimizer, *, gradient_clipping: float | None
    ) -> None:
        self._engine = engine
        self.optimizer = optimizer
        self._gradient_clipping = gradient_clipping
        self._clipping_factor: float | None = None

    def set_learning_rate(self, learning_rate: float) -> None:
        self.optimizer.param_groups[0]["lr"] = learning_rate

    def backward(self, loss: Tensor) -> None:
        # The losses of micro batches are parts of a sum, not means.
        self._engine.backward(loss, scale_wrt_gas=False)

    def step(self) -> None:
        self.optimizer.step()
        self._clipping_factor = None

    def state(self) -> Iterator[Tensor]:
        return state_of(self.optimizer)

    def whole_gradient(self, parameter: nn.Parameter) -> Tensor:
        """Returns the clipped gradient of a whole weight; all devices must ask for it.

        The engine clips within its step. The losses of later steps show that it does.
        """
        gradient = _whole_gradient(parameter)
        if self._gradient_clipping is None:
            return gradient
        if self._clipping_factor is None:
            parameters = self.optimizer.param_groups[0]["params"]
            norms = [_whole_gradient(each).norm() for each in parameters]
            norm = torch.stack(norms).norm().item()
            self._clipping_factor = min(1.0, self._gradient_clipping / (norm + 1e-6))
        return gradient * self._clipping_factor


def _whole_gradient(parameter: nn.Parameter) -> Tensor:
    from deepspeed.utils import safe_get_full_grad  # noqa: PLC0415

    gradient: Tensor = safe_get_full_grad(parameter)
    return gradient


@dataclass(frozen=True, kw_only=True)
class DevicesOfEngine(DataParallel):
    """The devices of a training by DeepSpeed's engine."""

    engine: Any

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[object]:
        self.engine.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def held(self) -> Sequence[Tensor]:
        """Returns all tensors of this process: ZeRO has many, in places that releases change."""
        gc.collect()
        return [found for found in gc.get_objects() if issubclass(type(found), Tensor)]

    def begin_evaluation(self) -> None:
        pass  # it frees the weights that it gathered in any case

    def end_evaluation(self) -> None:
        pass


def start_engine(
    parts: ModelParts,
    config: TrainingConfig,
    workload: Workload,
    *,
    rule: UpdateRule,
    device: torch.device,
) -> tuple[DevicesOfEngine, UpdateByEngine]:
    """Hands a model, to which all else has been applied, over to DeepSpeed's engine.

    The model's weights are on the host where stage 3 divides them, one after the other, so that
    the device never has all of them.
    """
    devices = workload.devices_per_trial
    deepspeed = _prepared_package(device, devices=devices)
    settings = settings_of(config, workload)
    if divides_weights(config):
        deepspeed.zero.Init(module=parts.model, config_dict_or_path=settings, dtype=torch.float32)
        for module in parts.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)
        for parameter in parts.model.parameters():
            if hasattr(parameter, "quant_state"):  # of nf4, whose codes alone are divided
                parameter.quant_state.to(device)
    parameters = [parameter for parameter in parts.model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=parts.model,
        optimizer=rule.make_optimizer(parameters),
        config=settings,
        dist_init_required=False,
    )
    if device.type == "cpu":
        backend = deepspeed.comm.comm.cdb
        backend.all_reduce = released(backend.all_reduce)
    found = DevicesOfEngine(
        module=engine,
        engine=engine,
        device=device,
        size=devices,
        index=torch.distributed.get_rank(),
        group=torch.distributed.group.WORLD,
        devices=devices,
    )
    optimizer = EngineOptimizer(engine, parameters, learning_rate=rule.learning_rate)
    update = UpdateByEngine(engine, optimizer, gradient_clipping=workload.gradient_clipping)
    return found, update


def divides_weights(config: TrainingConfig) -> bool:
    """Returns whether a device has only a part of the weights between steps."""
    return config.sharding == "zero3" or config.offload == "all"


def settings_of(config: TrainingConfig, workload: Workload) -> dict[str, Any]:
    """Returns those of an export; the optimizer is made here."""
    recipe = Recipe(config=config, workload=workload, device_type="cuda", origin="a trial")
    return {**engine_settings(recipe), **client_settings(config)}


def _prepared_package(device: torch.device, *, devices: int) -> Any:
    """Returns DeepSpeed, with torch.distributed and the environment as it expects them."""
    if not torch.distributed.is_initialized():  # one device, which sends nothing to anybody
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    os.environ["LOCAL_SIZE"] = str(devices)
    # It logs every part of its settings.
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed  # noqa: PLC0415

    # An operator of inference, which takes a compiler more than a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
