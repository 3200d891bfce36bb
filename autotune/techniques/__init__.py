"""Techniques, one file each, and the one place where they meet a model, in the order that works.

Imported only in a trial's own process: this loads torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autotune.models.parts import ModelParts
from autotune.models.weights import load_model
from autotune.spec.config import TrainingConfig
from autotune.spec.workload import Workload
from autotune.techniques import (
    activation_offload,
    allocator,
    attention,
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
    """A model with every technique of a configuration applied, and what updates it."""

    parts: ModelParts
    updater: Updater
    parameters_by_block: Mapping[str, Sequence[nn.Parameter]]
    """What is trained: `block 0`, `block 1`, ... and `rest`, as the model was before techniques
    wrapped its parts."""


def before_the_device(config: TrainingConfig) -> None:
    """What must be decided before the process first touches the device."""
    allocator.set_allocator(config.allocator)


def apply_techniques(
    config: TrainingConfig, workload: Workload, *, weights_file: Path | None, device: torch.device
) -> Training:
    """The workload's model with the weights of `weights_file` (None: unset, for fake tensors) and every technique."""
    # Process-wide settings first: they must hold when the first kernel runs and when the first
    # graph is compiled.
    precision.set_matmul_precision(config.precision)
    memory_budget.set_memory_budget(config.memory_budget)
    attention.set_attention_backend(config.attention)
    # Weights arrive in their final dtype: nothing larger than what is trained ever stands on the
    # device.
    parts = load_model(
        workload, file=weights_file, dtype=precision.weights_dtype(config.precision), device=device
    )
    check_parts(parts, config)
    parameters = [parameter for parameter in parts.model.parameters() if parameter.requires_grad]
    loss.set_loss(parts, config.loss)
    parameters_by_block = parts.parameters_by_block()
    # Before anything wraps a block, so that whatever recomputes or compiles it meets the layers
    # that will run.
    fp8.convert_blocks(parts, config.precision)
    reshape(parts, config)
    # The optimizer wants the parameters that will be trained; wrapping has not replaced them.
    updater = make_updater(
        parameters,
        UpdateRule(
            optimizer=config.optimizer,
            fusion=config.optimizer_fusion,
            learning_rate=workload.learning_rate_of(config.optimizer),
            rounds_stochastically=config.precision == "bf16-stochastic",
            seed=workload.seed,
        ),
        scaler=precision.gradient_scaler(config.precision, device=device),
        gradient_clipping=workload.gradient_clipping,
    )
    return Training(parts=parts, updater=updater, parameters_by_block=parameters_by_block)


def reshape(parts: ModelParts, config: TrainingConfig) -> None:
    """Every technique that stands inside the model, in a trial of ours as in one of somebody's script."""
    # Inside the compiled region: the partitioner sees what checkpointing recomputes and fuses it.
    checkpointing.checkpoint_in_blocks(parts, config.checkpointing)
    compilation.compile_blocks(parts, config.compile)
    # Segments hold several blocks, so with compiled blocks they stand outside them.
    checkpointing.checkpoint_segments(parts, config.checkpointing)
    # The whole model last: all of the above is then inside its one graph.
    compilation.compile_model(parts, config.compile)


def find_unavailable(
    choices: Mapping[str, Sequence[Any]], *, device: torch.device
) -> dict[str, dict[str, str]]:
    """What of `choices`, {technique: values}, does not work on `device`: {technique: {value: reason}}.

    Each is tried out on the device. A fused update that only one optimizer lacks is no entry here:
    that is a rule of `autotune/spec/config.py`.
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
    }
    found: dict[str, dict[str, str]] = {}
    for technique, probe in probes.items():
        for value in choices.get(technique, ()):
            if (reason := probe(value)) is not None:
                found.setdefault(technique, {})[value] = reason
    return found
