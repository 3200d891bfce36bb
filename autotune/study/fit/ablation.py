"""Ablation of `fit`: techniques added one by one, to show by how much each lets the model grow."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from autotune.spec.config import Sharding, TrainingConfig
from autotune.spec.optimizers import OPTIMIZERS


@dataclass(frozen=True, kw_only=True)
class FitStep:
    """One configuration of the ablation."""

    name: str
    """What this step changes of the one before."""
    config: TrainingConfig


def ablation_steps(base: TrainingConfig, *, accumulates: bool) -> Iterator[FitStep]:
    """Yield the steps, each with the changes of all steps before it; all are legal.

    The order follows what dominates the peak. Activations are most of it in a plain training, so
    checkpointing is first. Mixed precision halves the activations that are left and saves time on
    most devices; it keeps fp32 weights, and with many layers can need more memory than it saves.
    Then gradients dominate: the step in backward frees each at once (not with accumulation, where
    it would be wrong). Then weights (bf16-true) and optimizer state (adafactor for an optimizer
    that stores one or two numbers for each parameter). Compiling blocks that are recomputed anyway
    changes memory least and takes longest to predict, so it is last.
    """
    yield FitStep(name="plain fp32", config=base)
    steps: list[tuple[str, dict[str, Any]]] = [
        ("+ block checkpointing", {"checkpointing": "block"}),
        ("+ bf16-mixed", {"precision": "bf16-mixed"}),
    ]
    if not accumulates:
        steps.append(("+ step in backward", {"optimizer_fusion": "backward"}))
    steps.append(("bf16-true for mixed", {"precision": "bf16-true"}))
    if OPTIMIZERS[base.optimizer].state >= 1:
        steps.append((f"adafactor for {base.optimizer}", {"optimizer": "adafactor"}))
    steps.append(("+ compile block", {"compile": "block"}))
    config = base
    for name, changes in steps:
        config = replace(config, **changes)
        yield FitStep(name=name, config=config)


def sharding_steps(base: TrainingConfig) -> Iterator[FitStep]:
    """Yield configurations that divide ever more of the model among devices; all are legal."""
    shardings: tuple[Sharding, ...] = ("ddp", "zero1", "zero2", "zero3")
    for sharding in shardings:
        yield FitStep(name=sharding, config=replace(base, sharding=sharding))
    base = replace(base, sharding="zero3", checkpointing="block")
    yield FitStep(name="+ block checkpointing", config=base)
    yield FitStep(name="+ bf16-mixed", config=replace(base, precision="bf16-mixed"))
