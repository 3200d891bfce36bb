"""Techniques added one by one, for the question how much each of them lets grow."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from autotune.spec.config import TrainingConfig


@dataclass(frozen=True, kw_only=True)
class AblationStep:
    name: str
    """What this rung changes of the one before."""
    config: TrainingConfig


def ladder(base: TrainingConfig, *, accumulates: bool) -> Iterator[AblationStep]:
    """Each rung keeps what the ones before it changed, so that the last has all of them; all rungs are legal.

    The order is that in which the peak wants them. Activations are the most of a plain training, so
    checkpointing is first; then what is left of them and, on most devices, time, by mixed
    precision, which keeps fp32 weights and with many layers can need more memory than it saves.
    With the activations gone the gradients stand out: the step in backward frees each at once (not
    with accumulation, where it would be wrong). Then weights (bf16-true) and optimizer state
    (adafactor in place of what keeps one or two numbers a parameter). Compiling blocks that are
    recomputed anyway changes memory least and takes longest to predict: last.
    """
    yield AblationStep(name="plain fp32", config=base)
    steps: list[tuple[str, dict[str, Any]]] = [
        ("+ block checkpointing", {"checkpointing": "block"}),
        ("+ bf16-mixed", {"precision": "bf16-mixed"}),
    ]
    if not accumulates:
        steps.append(("+ step in backward", {"optimizer_fusion": "backward"}))
    steps.append(("bf16-true for mixed", {"precision": "bf16-true"}))
    if base.optimizer in ("adamw", "sgd"):
        steps.append((f"adafactor for {base.optimizer}", {"optimizer": "adafactor"}))
    steps.append(("+ compile block", {"compile": "block"}))
    config = base
    for name, choices in steps:
        config = replace(config, **choices)
        yield AblationStep(name=name, config=config)
