"""What a model lacks for a technique, found by its structure and one forward pass of shapes on the meta device.

What a *device* lacks, `find_unavailable` finds by trying; here only whether its attention kernels
take the calls that this model makes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autotune.errors import IllegalConfiguration
from autotune.models.parts import ModelParts
from autotune.spec.config import FP8_MULTIPLE, TrainingConfig
from autotune.techniques import attention
from autotune.techniques.attention import AttentionCall, CallsOfAttention
from autotune.techniques.fp8 import can_be_fp8

_EXAMINED_TOKENS = 8
_CPU = torch.device("cpu")


def missing_parts(
    parts: ModelParts,
    choices: Mapping[str, Sequence[Any]],
    *,
    device: torch.device = _CPU,
    sequence_length: int = _EXAMINED_TOKENS,
) -> dict[str, dict[str, str]]:
    """What of `choices`, {technique: values}, a model on the meta device cannot take: {technique: {value: reason}}.

    `device` is where it will be trained, on sequences of `sequence_length` tokens. The model is of
    no use afterwards: its weights are bf16, which is all that torch's grouped product of experts
    takes on the meta device.
    """
    parts.model.bfloat16()
    found: dict[str, dict[str, str]] = {}
    backends = [value for value in choices.get("attention", ()) if value != "auto"]
    if refusals := _why_not_attention(
        parts, backends, device=device, sequence_length=sequence_length
    ):
        found["attention"] = refusals
    for technique, values in choices.items():
        for value in values:
            if reason := _why_not(parts, technique, value):
                found.setdefault(technique, {})[str(value)] = reason
    return found


def check_parts(parts: ModelParts, config: TrainingConfig) -> None:
    """Raises IllegalConfiguration where a technique of `config` needs a part that was not found in the model."""
    for technique, value in config.to_dict().items():
        reason = _part_lacking(parts, technique, value)
        if reason is None and (technique, value) == ("loss", "chunked"):
            reason = None if _logits_are_the_heads(parts, where_unknown=True) else _CHANGED_LOGITS
        if reason is not None:
            raise IllegalConfiguration(
                f"{technique} {value} cannot be applied: {reason}", hint=f"use another {technique}"
            )


_CHANGED_LOGITS = "the model changes the logits after its head has made them"


def _why_not(parts: ModelParts, technique: str, value: Any) -> str | None:
    if reason := _part_lacking(parts, technique, value):
        return reason
    if (technique, value) == ("loss", "chunked") and not _logits_are_the_heads(
        parts, where_unknown=False
    ):
        return _CHANGED_LOGITS
    return None


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
        case ("precision", "fp8") if not _can_be_fp8(parts):
            return f"no torch.nn.Linear in the model's blocks has sides that are multiples of {FP8_MULTIPLE}"
        case ("loss", "chunked") if parts.head is None:
            return "the model has no linear head that makes its logits"
    return None


@torch.no_grad()
def _logits_are_the_heads(parts: ModelParts, *, where_unknown: bool) -> bool:
    """A loss in chunks computes logits itself; so they must come from the head as they are, and from nothing else.

    `where_unknown`: the answer for a model that cannot make one pass over a few tokens here.
    """
    logits = getattr(parts.model, "logits", None)
    if logits is None:
        return True  # it calls its `token_loss` with a head that is known to make the logits
    made: list[Tensor] = []
    assert parts.head is not None
    was_training = parts.model.training
    parts.model.eval()  # no dropout, which would draw from the training's random numbers
    handle = parts.head.register_forward_hook(lambda _module, _inputs, output: made.append(output))
    try:
        returned = logits(
            torch.zeros(1, _EXAMINED_TOKENS, dtype=torch.int64, device=_device_of(parts.model))
        )
    except Exception:  # whatever a model cannot do with shapes alone, or with a few tokens
        return where_unknown
    finally:
        handle.remove()
        parts.model.train(was_training)
    return len(made) == 1 and made[0] is returned


def _why_not_attention(
    parts: ModelParts, backends: Sequence[Any], *, device: torch.device, sequence_length: int
) -> dict[str, str]:
    """Of the backends that work on `device` at all, those that do not take some call of this model."""
    backends = [
        backend for backend in backends if attention.unavailable(backend, device=device) is None
    ]
    if not backends:
        return {}
    calls = _attention_calls(parts, sequence_length)
    if isinstance(calls, str):
        return dict.fromkeys(backends, calls)
    found = {}
    for backend in backends:
        reasons = (attention.unavailable(backend, device=device, call=call) for call in calls)
        if reason := next(filter(None, reasons), None):
            found[backend] = f"it does not take this model's attention: {reason}"
    return found


def _attention_calls(parts: ModelParts, sequence_length: int) -> list[AttentionCall] | str:
    """The calls that one forward pass makes, or why they are not known."""
    tokens = torch.zeros(1, sequence_length, dtype=torch.int64, device=_device_of(parts.model))
    try:
        with CallsOfAttention() as seen:
            parts.model(tokens, tokens)
    except Exception as error:  # whatever a model cannot do with shapes alone
        lines = str(error).splitlines()
        return f"it cannot be seen how the model attends: {lines[0] if lines else type(error).__name__}"
    return list(seen.calls) or "the model does not attend through scaled_dot_product_attention"


def _can_be_fp8(parts: ModelParts) -> bool:
    return parts.blocks_owner is not None and any(
        can_be_fp8(layer) for block in parts.blocks for layer in block.modules()
    )


def _device_of(model: nn.Module) -> torch.device:
    return next(parameter.device for parameter in model.parameters())
