"""What a model lacks for a technique, found by its structure and one forward pass of shapes on the meta device.

What a *device* lacks, `find_unavailable` finds by trying.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autotune.config import TrainingConfig
from autotune.errors import IllegalConfiguration
from autotune.models.parts import ModelParts

_EXAMINED_TOKENS = 8


def missing_parts(parts: ModelParts, choices: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, str]]:
    """What of `choices`, {technique: values}, a model on the meta device cannot take: {technique: {value: reason}}."""
    found: dict[str, dict[str, str]] = {}
    for technique, values in choices.items():
        for value in values:
            if reason := _why_not(parts, technique, value):
                found.setdefault(technique, {})[str(value)] = reason
    return found


def check_parts(parts: ModelParts, config: TrainingConfig) -> None:
    """Raises IllegalConfiguration where a technique of `config` needs a part that was not found in the model."""
    for technique, value in config.to_dict().items():
        if reason := _part_lacking(parts, technique, value):
            raise IllegalConfiguration(
                f"{technique} {value} cannot be applied: {reason}", hint=f"use another {technique}"
            )


def _why_not(parts: ModelParts, technique: str, value: Any) -> str | None:
    if reason := _part_lacking(parts, technique, value):
        return reason
    return _why_no_chunked_loss(parts) if (technique, value) == ("loss", "chunked") else None


def _part_lacking(parts: ModelParts, technique: str, value: Any) -> str | None:
    match technique, value:
        case ("checkpointing", "none") | ("compile", "none" | "model"):
            return None
        case ("checkpointing" | "compile", _) if parts.blocks_owner is None:
            return "the model has no list of alike blocks"
        case ("checkpointing", "attention") if parts.attention_name is None:
            return "no attention was found in the model's blocks"
        case ("checkpointing", "sqrt") if not parts.blocks_are_called_alike:
            return "it runs several blocks as one, and this model's take different arguments"
        case ("loss", "chunked") if parts.head is None:
            return "the model has no linear head that makes its logits"
    return None


def _why_no_chunked_loss(parts: ModelParts) -> str | None:
    """A loss in chunks computes logits itself; so they must come from the head as they are, and from nothing else."""
    assert parts.head is not None
    if getattr(parts.model, "logits", None) is None:
        return None  # it calls its `token_loss` with a head that is known to make the logits
    try:
        is_the_heads = _logits_are_the_heads(parts)
    except Exception:  # experts' grouped product has shapes for bf16 only
        try:
            parts.model.to(torch.bfloat16)
            is_the_heads = _logits_are_the_heads(parts)
        except Exception as error:  # whatever a model cannot do with shapes alone
            lines = str(error).splitlines()
            return f"it cannot be seen where the logits come from: {lines[0] if lines else type(error).__name__}"
    return None if is_the_heads else "the model changes the logits after its head has made them"


def _logits_are_the_heads(parts: ModelParts) -> bool:
    made: list[Tensor] = []
    assert parts.head is not None
    handle = parts.head.register_forward_hook(lambda _module, _inputs, output: made.append(output))
    try:
        tokens = torch.zeros(1, _EXAMINED_TOKENS, dtype=torch.int64, device=_device_of(parts.model))
        returned = parts.model.logits(tokens)  # type: ignore[operator]
    finally:
        handle.remove()
    return len(made) == 1 and made[0] is returned


def _device_of(model: nn.Module) -> torch.device:
    return next(parameter.device for parameter in model.parameters())
