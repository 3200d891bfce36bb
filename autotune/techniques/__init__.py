"""Applies the techniques of a configuration to a model, in the order in which they work together.

Each technique is one file: its docstring has what each value saves, costs and needs, and its
source. Imported only in the process of a trial, since it loads torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autotune.models.parts import Buffers, ModelParts
from autotune.models.weights import Placement, load_model
from autotune.shipped.frozen_on_host import FrozenOnHost
from autotune.shipped.fused_adapters import fuse_adapters
from autotune.spec.config import HELD_BY_THE_HOST, TrainingConfig
from autotune.spec.setting import NO_LIMIT
from autotune.spec.workload import Workload
from autotune.techniques import (
    adapter,
    allocator,
    attention,
    base_weights,
    checkpointing,
    compilation,
    deepspeed_engine,
    feed_forward,
    fp8,
    gradient_accumulation_dtype,
    int8_mixed,
    kernels,
    loss,
    memory_budget,
    offload,
    optimizer_fusion,
    pinned_memory,
    precision,
    sharding,
)
from autotune.techniques.deepspeed_engine import UpdateByEngine
from autotune.techniques.extras import missing_package
from autotune.techniques.optimizer import trained_parameters
from autotune.techniques.optimizer_fusion import Updater, UpdateRule, make_updater
from autotune.techniques.requirements import check_parts
from autotune.techniques.sharding import DataParallel
from autotune.techniques.tensor_parallel import SplitWeights, TensorParallel

ChangeBlocks = Callable[[Sequence[nn.Module]], None]
"""Changes the blocks of a model, each of which is there once, in the order in which they run."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model with every technique of a configuration applied, and its updater."""

    parts: ModelParts
    devices: DataParallel
    updater: Updater
    parameters_by_block: Mapping[str, Sequence[nn.Parameter]]
    """The trained parameters of `block 0`, `block 1`, ... and `rest`, grouped before techniques
    wrapped the model's parts."""
    buffers: Buffers
    """Where the model's buffers are, by the names that they had then."""
    tensor_parallel: TensorParallel | None = None
    """The devices among which the matrices are split, where they are."""
    on_host: FrozenOnHost | None = None
    """The frozen weights of blocks in the host's memory, with offload frozen."""
    unquantized: tuple[int, int] = (0, 0)
    """How many numbers of frozen weights are not quantized, and how many are."""

    def whole_gradient(self, parameter: nn.Parameter) -> Tensor:
        """Returns the gradient of a whole weight, of which each device may have a part.

        All devices must ask for it.
        """
        if isinstance(self.updater, UpdateByEngine):
            return self.updater.whole_gradient(parameter)
        whole = sharding.gradient_of(parameter)
        if self.tensor_parallel is None:
            return whole
        return self.tensor_parallel.whole_gradient(parameter, whole)

    @property
    def number_of_parameters(self) -> int:
        """How many numbers are trained, of all devices that share a model together."""
        trained = [one for one in self.parts.model.parameters() if one.requires_grad]
        total = sum(parameter.numel() for parameter in trained)
        if self.tensor_parallel is not None:
            split = [one for one in trained if self.tensor_parallel.is_split(one)]
            total += (self.tensor_parallel.size - 1) * sum(one.numel() for one in split)
        return total


def before_the_device(config: TrainingConfig) -> None:
    """Makes the settings that a prediction, which touches no device, must not have."""
    allocator.set_allocator(config.allocator)
    compilation.set_mode(config.compile_mode)


def apply_techniques(
    config: TrainingConfig,
    workload: Workload,
    *,
    weights_file: Path | None,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    dequantized: bool = False,
    change_blocks: ChangeBlocks | None = None,
) -> Training:
    """Returns the workload's model with every technique applied, and its updater.

    `mesh` arranges the devices of the trial, where it has several (`sharding.make_mesh`).
    `weights_file` has the initial weights; None leaves them unset, for fake tensors. With
    `dequantized`, quantized base weights are what they stand for, in ordinary layers: what they are
    compared with. `change_blocks` does in the blocks what is planned for an activation budget.
    Raises IllegalConfiguration where the model lacks a part that a technique needs.
    """
    # Process-wide settings come first: they must be in effect when the first kernel runs and when
    # the first graph is compiled.
    precision.set_matmul_precision(config.precision)
    memory_budget.set_memory_budget(config.memory_budget)
    attention.set_attention_backend(config.attention)
    # Weights are loaded in their final dtype, so that the device never holds anything larger than
    # what is trained.
    split = None if config.tensor_parallel == 1 else sharding.tensor_parallel_of(mesh)
    placement = _placement(
        config, workload, device=device, dequantized=dequantized, tensor_parallel=split
    )
    if config.offload == "frozen" and device.type == "cuda":
        pinned_memory.bound_frozen_weights()
    parts = load_model(workload, file=weights_file, placement=placement)
    on_host = placement.on_host if isinstance(placement, adapter.AdaptedWeights) else None
    if on_host is not None:
        on_host.follow(list(parts.blocks))  # before anything runs a block
    check_parts(parts, config)
    loss.set_loss(parts, config.loss)
    loaded_by_block = parts.parameters_by_block()
    loaded = dict(parts.model.named_parameters())
    buffers = parts.buffers()
    kernels.set_kernels(parts, config.kernels, device=device)
    if config.adapter_kernels == "fused":
        fuse_adapters(parts.model)  # in place of Liger's gated activations, too
    # Before anything wraps a block, so that checkpointing and compilation see the layers that will
    # run.
    fp8.convert_blocks(parts, config.precision)
    int8_mixed.convert_blocks(parts, config.precision)
    wrap_blocks(parts, config, change_blocks=change_blocks)
    rule = UpdateRule(
        optimizer=config.optimizer,
        fusion=config.optimizer_fusion,
        learning_rate=workload.learning_rate_of(config.optimizer, config.adapter),
        rounds_stochastically=config.precision == "bf16-stochastic",
        seed=workload.seed,
    )
    if config.engine == "deepspeed":
        devices_of_engine, update = deepspeed_engine.start_engine(
            parts, config, workload, rule=rule, device=device
        )
        return Training(
            parts=parts,
            devices=devices_of_engine,
            updater=update,
            parameters_by_block=loaded_by_block,
            buffers=buffers,
            unquantized=placement.unquantized(),
        )
    devices = sharding.shard(parts, config, mesh=mesh, device=device, placement=placement)
    # Wrapping a module does not replace its parameters, but dividing them does.
    parameters = trained_parameters(parts.model, config.optimizer)
    if split is not None:
        split.follow({name: placement.current(one) for name, one in loaded.items()})
    optimizer: torch.optim.Optimizer | None = None
    if config.sharding == "zero1":
        optimizer = sharding.divide_state(rule, parameters, group=devices.group)
    elif config.offload == "optimizer":
        if device.type == "cuda":  # a prediction takes nothing of this host
            pinned_memory.check_host_memory(config, parts.model.parameters())
        optimizer = offload.StateOnHost(parameters, rule)
        rule = offload.rule_after_backward(rule)
    updater = make_updater(
        parameters,
        rule,
        optimizer=optimizer,
        scaler=precision.gradient_scaler(config.precision, device=device),
        gradient_clipping=workload.gradient_clipping,
        tensor_parallel=split,
    )
    gradient_accumulation_dtype.set_accumulation_dtype(
        updater.optimizer, config.gradient_accumulation_dtype
    )
    return Training(
        parts=parts,
        devices=devices,
        updater=updater,
        parameters_by_block={
            block: [placement.current(parameter) for parameter in own]
            for block, own in loaded_by_block.items()
        },
        buffers=buffers,
        tensor_parallel=split,
        on_host=on_host,
        unquantized=placement.unquantized(),
    )


def _placement(
    config: TrainingConfig,
    workload: Workload,
    *,
    device: torch.device,
    dequantized: bool,
    tensor_parallel: TensorParallel | None,
) -> Placement:
    dtype = precision.weights_dtype(config.precision)
    if config.engine == "deepspeed" and deepspeed_engine.divides_weights(config):
        device = torch.device("cpu")
    whole = Placement(dtype=dtype, device=device)
    if config.adapter != "none":
        whole = adapter.AdaptedWeights(config, workload, device=device, dequantized=dequantized)
    if config.engine == "torch" and sharding.divides_weights(config):
        return sharding.ShardedWeights(
            whole,
            device_of_weights=torch.device("cpu") if config.offload == "all" else device,
            tensor_parallel=tensor_parallel,
        )
    if tensor_parallel is not None:
        return SplitWeights(tensor_parallel, dtype=dtype, device=device)
    return whole


def wrap_blocks(
    parts: ModelParts, config: TrainingConfig, *, change_blocks: ChangeBlocks | None = None
) -> None:
    """Applies checkpointing and compilation to a model, in trials and in users' scripts."""
    feed_forward.set_feed_forward(parts, config.feed_forward)
    assert change_blocks is not None or config.activation_budget == NO_LIMIT, "there is no plan"
    if change_blocks is not None:
        change_blocks(list(dict.fromkeys(parts.blocks)))
    # Inside the compiled region, so that the partitioner sees what is recomputed and fuses it.
    checkpointing.checkpoint_in_blocks(parts, config.checkpointing)
    compilation.compile_blocks(parts, config.compile)
    # A segment holds several blocks, so it wraps them after each has been compiled.
    checkpointing.checkpoint_segments(parts, config.checkpointing)
    # The whole model last, so that its one graph contains all of the above.
    compilation.compile_model(parts, config.compile)


def find_unavailable(
    choices: Mapping[str, Sequence[Any]], *, device: torch.device
) -> dict[str, dict[str, str]]:
    """Returns which of `choices`, {technique: values}, do not work on `device`, and why.

    The result is {technique: {value: reason}}. Each value is tried on the device. A fused update
    that only one optimizer lacks is not listed here: that is a rule of `autotune/spec/config.py`.
    """
    probes: dict[str, Callable[[Any], str | None]] = {
        "precision": lambda value: precision.unavailable(value, device=device),
        "compile": lambda value: compilation.unavailable(value, device=device),
        "optimizer": lambda value: optimizer_fusion.unavailable("none", value, device=device),
        "optimizer_fusion": lambda value: optimizer_fusion.unavailable(
            value, "adamw", device=device
        ),
        "allocator": lambda value: allocator.unavailable(value, device=device),
        "attention": lambda value: attention.unavailable(value, device=device),
        "kernels": lambda value: kernels.unavailable(value, device=device),
        "base_weights": lambda value: base_weights.unavailable(value, device=device),
    }
    found: dict[str, dict[str, str]] = {}
    for technique, values in choices.items():
        on_host = HELD_BY_THE_HOST.get(technique, {}) if device.type == "cpu" else {}
        probe = probes.get(technique, lambda value: None)
        for value in values:
            reason = on_host.get(value) or missing_package(technique, value) or probe(value)
            if reason is not None:
                found.setdefault(technique, {})[value] = reason
    return found
