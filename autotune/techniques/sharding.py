"""Sharding: what the devices of one trial share out among them.

Each device trains its own part of every global batch. What it holds of the model:

| value | weights | gradients | optimizer's state | by |
|---|---|---|---|---|
| ddp | all | all | all | DistributedDataParallel (arXiv:2006.15704) |
| zero1 | all | all | a part | ZeroRedundancyOptimizer, the first stage of ZeRO |
| zero2 | a part, in a step all | a part | a part | FSDP2, no resharding after the forward |
| zero3 | a part, one block at a time | a part | a part | FSDP2 |
| hsdp | as zero3 within a group | | | FSDP2 on a mesh of groups and devices of a group |

The stages are those of ZeRO (arXiv:1910.02054). FSDP2's form of stage 2 has a part of the weights
between steps, where ZeRO's has all of them. The gradients of all devices are added up once for each
global batch by ddp and zero1, and for each micro batch by the others, which so never hold more than
a part of them for long. Sources: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html,
https://docs.pytorch.org/tutorials/recipes/zero_redundancy_optimizer.html

Communication between devices is torch.distributed's default process group, which must exist. In a
prediction it is a fake one, which has no other devices.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo.config
import torch.distributed
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from autotune.models.parts import ModelParts
from autotune.models.weights import Placement
from autotune.shipped.fsdp import sharded_units
from autotune.shipped.gloo import use_gloo
from autotune.shipped.replication import GradientBuckets, replicate
from autotune.spec.config import SHARDED_WEIGHTS, TrainingConfig
from autotune.techniques import base_weights
from autotune.techniques.optimizer import Parameters
from autotune.techniques.optimizer_fusion import UpdateRule
from autotune.techniques.pinned_memory import check_host_memory
from autotune.techniques.tensor_parallel import TensorParallel


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Returns the whole gradient of a parameter, of which each device may have a part."""
    assert parameter.grad is not None
    gradient = parameter.grad
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """This process as one of the devices among which global batches are divided."""

    module: nn.Module
    """What is called in place of the model."""
    device: torch.device
    size: int = 1
    """How many parts a global batch has."""
    index: int = 0
    """Which part is this process's."""
    group: Any = None
    """The process group of the devices that have the other parts."""
    devices: int = 1
    """How many devices the trial has: those that train the same rows are counted, too."""
    buckets: "GradientBuckets | None" = None
    """Where DistributedDataParallel has the gradients."""
    reshards_after_forward: bool = True
    """Whether each forward pass of a training frees the weights that FSDP2 gathered for it."""

    def seed_dropout(self, seed: int) -> None:
        """Have each part of a global batch drop other activations, on all devices that train it.

        With tensor parallelism several have the same rows, and activations of which each has a
        copy: with masks of their own they would train different models.
        """
        if self.devices > 1:
            torch.manual_seed(seed if self.size == 1 else seed + 1 + self.index)

    def part_of(self, rows: Tensor) -> Tensor:
        """Returns this device's rows of a tensor [sequences of the global batch, ...]."""
        share = rows.shape[0] // self.size
        return rows[self.index * share : (self.index + 1) * share]

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Returns the context of a micro batch's forward and backward pass."""
        if isinstance(self.module, DistributedDataParallel) and not is_last:
            return self.module.no_sync()
        return nullcontext()

    def mean(self, value: Tensor) -> Tensor:
        """Returns the mean over all devices of a value that each has for its own part."""
        if self.size > 1:
            torch.distributed.all_reduce(value, group=self.group)
            value /= self.size
        return value

    def largest(self, value: float) -> float:
        """Returns the largest of the values that all devices of the trial have."""
        if self.devices == 1:
            return value
        return self._reduced([value], torch.distributed.ReduceOp.MAX, group=None)[0]

    def add_up(self, *values: float) -> list[float]:
        """Returns each value summed over the parts of a global batch."""
        if self.size == 1:
            return list(values)
        return self._reduced(values, torch.distributed.ReduceOp.SUM, group=self.group)

    def _reduced(self, values: Sequence[float], operation: Any, *, group: Any) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(numbers, op=operation, group=group)
        return numbers.tolist()

    def held(self) -> Sequence[Tensor]:
        """Returns the tensors that stay on the device for the communication."""
        return () if self.buckets is None else self.buckets.buffers

    def begin_evaluation(self) -> None:
        """Have each forward pass free the weights that it gathered: no backward pass follows."""
        if isinstance(self.module, FSDPModule):
            self.module.set_reshard_after_forward(True)

    def end_evaluation(self) -> None:
        """Have forward passes be those of a training again."""
        if isinstance(self.module, FSDPModule):
            self.module.set_reshard_after_forward(self.reshards_after_forward)


class ShardedWeights(Placement):
    """Leaves the parameters on the meta device until they are divided, then loads this one's part.

    So no device ever holds the whole model: only one weight at a time, where it is quantized.
    `whole` says how one device would have the weights. With tensor parallelism, what is divided is
    what that leaves a device.
    """

    def __init__(
        self,
        whole: Placement,
        *,
        device_of_weights: torch.device,
        tensor_parallel: TensorParallel | None = None,
    ) -> None:
        super().__init__(dtype=whole.dtype, device=whole.device)
        self._whole = whole
        self._device_of_weights = device_of_weights
        self._tensor_parallel = tensor_parallel
        self._weights: dict[nn.Parameter, tuple[str, nn.Parameter, Tensor | None]] = {}
        self._owners: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._current: dict[nn.Parameter, nn.Parameter] = {}

    def change(self, parts: ModelParts) -> ModelParts:
        parts = self._whole.change(parts)
        if self._tensor_parallel is not None:
            self._tensor_parallel.split(parts)
        return parts

    def name_in_file(self, name: str) -> str | None:
        return self._whole.name_in_file(name)

    def place(self, name: str, parameter: nn.Parameter, weight: Tensor | None) -> nn.Parameter:
        placed = self._whole.outline(name, parameter, weight)
        self._weights[placed] = (name, parameter, weight)
        return placed

    def unquantized(self) -> tuple[int, int]:
        return self._whole.unquantized()

    def remember_owners(self, model: nn.Module) -> None:
        """Note which module has which parameter, before the parameters are replaced by parts."""
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                self._owners.append((module, name, parameter))

    def load_parts(self, model: nn.Module) -> None:
        """Give every parameter, which is now divided, memory for its part, and the part."""
        model._apply(
            lambda tensor: (
                torch.empty_like(tensor, device=self._device_of_weights)
                if tensor.is_meta
                else tensor
            )
        )
        for module, name, before in self._owners:
            if before not in self._current:  # tied parameters stay tied
                current = self._current[before] = getattr(module, name)
                path, parameter, weight = self._weights.pop(before)
                if self._tensor_parallel is not None and weight is not None:
                    weight = self._tensor_parallel.part(path, weight)
                whole = self._whole.whole(path, parameter, weight)
                _copy_part(whole, current)
                base_weights.keep_scales(module, name, current, of=whole)

    def current(self, parameter: nn.Parameter) -> nn.Parameter:
        return self._current[parameter]


@torch.no_grad()
def _copy_part(weight: Tensor, parameter: nn.Parameter) -> None:
    """Copy this device's part of a whole weight on the host into a divided parameter."""
    assert isinstance(parameter, DTensor)
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    part = weight
    for dimension, (length, start) in enumerate(zip(shape, offset, strict=True)):
        part = part.narrow(dimension, min(start, part.shape[dimension] - length), length)
    parameter.to_local().copy_(part)


# -- applying it -----------------------------------------------------------------------------------


def divides_weights(config: TrainingConfig) -> bool:
    """Whether a device has only a part of the weights between steps."""
    return config.sharding in SHARDED_WEIGHTS or config.offload == "all"


def make_mesh(config: TrainingConfig, *, devices: int, device: torch.device) -> DeviceMesh | None:
    """Returns the arrangement of a trial's devices; None for one device, unless FSDP2 is used.

    DeepSpeed arranges them by itself.

    Devices with neighbouring numbers, which are the nearest to each other, split matrices.
    """
    if config.engine == "deepspeed" or (devices == 1 and config.offload != "all"):
        return None
    if not torch.distributed.is_initialized():  # one device, which sends nothing to anybody
        torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    replicas = devices // config.tensor_parallel
    sizes = {"shards": replicas}
    if config.sharding == "hsdp":
        group = config.sharding_group
        sizes = {"replicas": replicas // group, "shards": group}
    if replicas == 1 and config.tensor_parallel > 1:
        sizes = {}
    if config.tensor_parallel > 1:
        sizes["tensor"] = config.tensor_parallel
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def tensor_parallel_of(mesh: DeviceMesh | None) -> TensorParallel:
    """Returns this device's place among those that train the same rows."""
    assert mesh is not None
    return TensorParallel(mesh["tensor"])


def shard(
    parts: ModelParts,
    config: TrainingConfig,
    *,
    mesh: DeviceMesh | None,
    device: torch.device,
    placement: Placement,
) -> DataParallel:
    """Apply `config.sharding` to a model to which all else has been applied."""
    if mesh is None:
        return DataParallel(module=parts.model, device=device)
    devices = mesh.size()
    if config.tensor_parallel > 1:
        if devices == config.tensor_parallel:
            return DataParallel(module=parts.model, device=device, devices=devices)
        mesh = mesh["shards"]
    if divides_weights(config):
        assert isinstance(placement, ShardedWeights)
        _divide(parts, config, mesh=mesh, placement=placement)
        module, buckets = parts.model, None
    else:
        module = replicate(parts.model, mesh=mesh, device=device)
        buckets = GradientBuckets(module, reduced_in=config.gradient_reduction)
    return DataParallel(
        module=module,
        device=device,
        buckets=buckets,
        size=mesh.size(),
        index=torch.distributed.get_rank() // config.tensor_parallel,
        group=mesh.get_group() if mesh.ndim == 1 else torch.distributed.group.WORLD,
        devices=devices,
        reshards_after_forward=_reshards_after_forward(config),
    )


def _reshards_after_forward(config: TrainingConfig) -> bool:
    return config.sharding != "zero2"


def _divide(
    parts: ModelParts, config: TrainingConfig, *, mesh: DeviceMesh, placement: ShardedWeights
) -> None:
    placement.remember_owners(parts.model)
    reduced_in = torch.bfloat16 if config.gradient_reduction == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(
        # Under autocast the products are in 16 bits: the gathered weights may be, too.
        param_dtype=torch.bfloat16 if config.precision == "bf16-mixed" else None,
        reduce_dtype=reduced_in,
        cast_forward_inputs=False,
    )
    offload_policy = OffloadPolicy()
    if config.offload == "all":
        offload_policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": offload_policy,
        "reshard_after_forward": _reshards_after_forward(config),
    }
    for blocks in sharded_units(list(parts.blocks)):
        fully_shard(blocks, **settings)
    fully_shard(parts.model, **settings)
    if mesh.device_type == "cpu":
        use_gloo(parts.model)
    if mesh.device_type == "cuda":
        check_host_memory(config, parts.model.parameters())
    placement.load_parts(parts.model)


# -- the first stage of ZeRO -----------------------------------------------------------------------


def divide_state(
    rule: UpdateRule, parameters: Parameters, *, group: Any
) -> ZeroRedundancyOptimizer:
    """Returns the optimizer of `rule` with the parameters divided among the devices.

    Each updates its own and sends them to the others.
    """

    def make_part(part: Any, **_defaults: Any) -> torch.optim.Optimizer:
        return rule.make_optimizer(part)

    return ZeroRedundancyOptimizer(
        parameters,
        optimizer_class=make_part,  # type: ignore[arg-type]
        process_group=group,
        lr=rule.learning_rate,
    )
