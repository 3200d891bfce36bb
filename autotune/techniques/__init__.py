"""Applies the techniques of a configuration to a model, in the order in which they work together.

Each technique is one file: its docstring has what each value saves, costs and needs, and its
source. Imported only in the process of a trial, since it loads torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autotune.models.parts import ModelParts
from autotune.models.weights import Placement, load_model
from autotune.spec.config import TrainingConfig
from autotune.spec.workload import Workload
from autotune.techniques import (
    activation_offload,
    adapter,
    allocator,
    attention,
    base_weights,
    checkpointing,
    compilation,
    fp8,
    loss,
    memory_budget,
    optimizer_fusion,
    precision,
)
from autotune.techniques.optimizer_fusion import Updater, UpdateRule, make_updater
from autotune.techniques.requirements import check_parts


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model with every technique of a configuration applied, and its updater."""

    parts: ModelParts
    updater: Updater
    parameters_by_block: Mapping[str, Sequence[nn.Parameter]]
    """The trained parameters of `block 0`, `block 1`, ... and `rest`, grouped before techniques
    wrapped the model's parts."""


def before_the_device(config: TrainingConfig) -> None:
    """Makes the settings that must be made before the process first touches the device."""
    allocator.set_allocator(config.allocator)


def apply_techniques(
    config: TrainingConfig,
    workload: Workload,
    *,
    weights_file: Path | None,
    device: torch.device,
    dequantized: bool = False,
) -> Training:
    """Returns the workload's model with every technique applied, and its updater.

    `weights_file` has the initial weights; None leaves them unset, for fake tensors. With
    `dequantized`, quantized base weights are what they stand for, in ordinary layers: what they are
    compared with. Raises IllegalConfiguration where the model lacks a part that a technique needs.
    """
    # Process-wide settings come first: they must be in effect when the first kernel runs and when
    # the first graph is compiled.
    precision.set_matmul_precision(config.precision)
    memory_budget.set_memory_budget(config.memory_budget)
    attention.set_attention_backend(config.attention)
    # Weights are loaded in their final dtype, so that the device never holds anything larger than
    # what is trained.
    parts = load_model(
        workload,
        file=weights_file,
        placement=_placement(config, workload, device=device, dequantized=dequantized),
    )
    check_parts(parts, config)
    parameters = [parameter for parameter in parts.model.parameters() if parameter.requires_grad]
    loss.set_loss(parts, config.loss)
    parameters_by_block = parts.parameters_by_block()
    # Before anything wraps a block, so that checkpointing and compilation see the layers that will
    # run.
    fp8.convert_blocks(parts, config.precision)
    wrap_blocks(parts, config)
    # Wrapping a module does not replace its parameters: these are still the ones to train.
    updater = make_updater(
        parameters,
        UpdateRule(
            optimizer=config.optimizer,
            fusion=config.optimizer_fusion,
            learning_rate=workload.learning_rate_of(config.optimizer, config.adapter),
            rounds_stochastically=config.precision == "bf16-stochastic",
            seed=workload.seed,
        ),
        scaler=precision.gradient_scaler(config.precision, device=device),
        gradient_clipping=workload.gradient_clipping,
    )
    return Training(parts=parts, updater=updater, parameters_by_block=parameters_by_block)


def _placement(
    config: TrainingConfig, workload: Workload, *, device: torch.device, dequantized: bool
) -> Placement:
    if config.adapter == "none":
        return Placement(dtype=precision.weights_dtype(config.precision), device=device)
    return adapter.AdaptedWeights(
        config, seed=workload.seed, device=device, dequantized=dequantized
    )


def wrap_blocks(parts: ModelParts, config: TrainingConfig) -> None:
    """Applies checkpointing and compilation to a model, in trials and in users' scripts."""
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
        "activation_offload": lambda value: activation_offload.unavailable(value, device=device),
        "adapter": adapter.unavailable,
        "base_weights": lambda value: base_weights.unavailable(value, device=device),
    }
    found: dict[str, dict[str, str]] = {}
    for technique, probe in probes.items():
        for value in choices.get(technique, ()):
            reason = probe(value)
            if reason is not None:
                found.setdefault(technique, {})[value] = reason
    return found
