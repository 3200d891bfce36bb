"""Finds what a model lacks for a technique, from its structure and one forward pass of shapes.

The forward pass runs on the meta device. What a *device* lacks is found by `find_unavailable`; this
module only checks whether the device's attention kernels support the calls of this model.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autotune.errors import IllegalConfiguration, first_line_of
from autotune.models.parts import ModelParts
from autotune.shipped.fp8 import can_be_fp8
from autotune.shipped.fp8_sizes import FP8_MULTIPLE
from autotune.spec.config import (
    DEPENDENT_FIELDS,
    EIGHT_BIT_PRECISIONS,
    SELECTIVE,
    TrainingConfig,
)
from autotune.spec.optimizers import OPTIMIZERS
from autotune.techniques import attention, checkpointing, feed_forward, kernels, tensor_parallel
from autotune.techniques.adapter import missing_layers, saved_modules
from autotune.techniques.attention import AttentionCall, CallsOfAttention

_EXAMINED_TOKENS = 8
"""Tokens in a forward pass that examines the model."""
_CPU = torch.device("cpu")


def missing_parts(
    parts: ModelParts,
    choices: Mapping[str, Sequence[Any]],
    *,
    device: torch.device = _CPU,
    sequence_length: int | None = None,
    modules_to_save: Sequence[str] = (),
    own_ranks: Collection[str] = (),
) -> dict[str, dict[str, str]]:
    """Returns which of `choices`, {technique: values}, a model on the meta device does not support.

    The result is {technique: {value: reason}}. `device` is where the model will be trained, on
    sequences of `sequence_length` tokens, or as a script has them, with `modules_to_save` beside
    adapters, of which those of layers by a pattern of `own_ranks` have another rank. Do not use the
    model afterwards: its weights are converted to bf16, the only dtype that torch's grouped product
    of experts supports on the meta device. Raises InvalidInput for a module that it does not have.
    """
    parts.model.bfloat16()
    tried_tokens = sequence_length or _EXAMINED_TOKENS
    found: dict[str, dict[str, str]] = {}
    backends = [value for value in choices.get("attention", ()) if value != "auto"]
    unsupported = _unsupported_attention(
        parts, backends, device=device, sequence_length=tried_tokens
    )
    if unsupported:
        found["attention"] = unsupported
    has_adapters = any(adapter != "none" for adapter in choices.get("adapter", ()))
    saved = saved_modules(parts, modules_to_save) if has_adapters else {}
    for technique, values in choices.items():
        is_of_adapters = technique in DEPENDENT_FIELDS["adapter"]
        if is_of_adapters and not has_adapters:
            continue
        for value in values:
            if is_of_adapters:
                reason = missing_layers(
                    parts,
                    technique,
                    value,
                    saved=saved,
                    targets=choices.get("adapter_targets", ("all-linear",)),
                    own_ranks=own_ranks,
                )
            else:
                reason = _why_unsupported(parts, technique, value, if_unknown=False)
                if reason is None and (technique, value) == ("feed_forward", "tiled"):
                    reason = feed_forward.why_nothing_is_saved(
                        parts, sequence_length=sequence_length
                    )
                if reason is None and technique == "checkpointing" and value in SELECTIVE:
                    reason = checkpointing.why_not_recomputed(
                        parts, value, sequence_length=tried_tokens
                    )
            if reason:
                found.setdefault(technique, {})[str(value)] = reason
    return found


def missing_blocks(choices: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, str]]:
    """Returns which of `choices` need blocks, {technique: {value: reason}}."""
    without = ModelParts(model=nn.Module())
    found: dict[str, dict[str, str]] = {}
    needing = (
        *("checkpointing", "activation_budget", "compile", "optimizer"),
        *("offload", "sharding", "feed_forward"),
    )
    for technique in needing:
        for value in choices.get(technique, ()):
            reason = _missing_part(without, technique, value)
            if reason:
                found.setdefault(technique, {})[str(value)] = reason
    return found


def check_parts(parts: ModelParts, config: TrainingConfig) -> None:
    """Raises IllegalConfiguration if the model does not support a technique of `config`."""
    for technique, value in config.to_dict().items():
        if technique in DEPENDENT_FIELDS["adapter"]:
            continue  # they are in the model already
        if technique == "kernels":
            continue  # trainers, too, leave a model as it is that Liger does not know
        reason = _why_unsupported(parts, technique, value, if_unknown=True)
        if reason is not None:
            raise IllegalConfiguration(
                f"{technique} {value} cannot be applied: {reason}", hint=f"use another {technique}"
            )


_CHANGED_LOGITS = "the model changes the logits after its head has made them"


def _why_unsupported(
    parts: ModelParts, technique: str, value: Any, *, if_unknown: bool
) -> str | None:
    """Returns why a technique is not supported; `if_unknown` as in `_logits_from_head`."""
    reason = _missing_part(parts, technique, value)
    if reason:
        return reason
    is_chunked_loss = (technique, value) == ("loss", "chunked")
    if is_chunked_loss and not _logits_from_head(parts, if_unknown=if_unknown):
        return _CHANGED_LOGITS
    return None


def _missing_part(parts: ModelParts, technique: str, value: Any) -> str | None:
    match technique, value:
        case ("checkpointing" | "activation_budget", "none") | ("compile", "none" | "model"):
            return None
        case ("checkpointing" | "activation_budget" | "compile", _) if parts.blocks_owner is None:
            return "the model has no list of alike blocks that its forward pass calls"
        case ("offload", "all" | "frozen") if parts.blocks_owner is None:
            return "it moves the weights of one block after the other, and the model has no blocks"
        case ("offload", "frozen") if len(set(parts.blocks)) < len(parts.blocks):
            return (
                "it moves the weights of each block, and this model calls one block several times"
            )
        case ("sharding", "zero2" | "zero3" | "hsdp") if parts.blocks_owner is None:
            return "it gathers the weights of a block at a time, and the model has no blocks"
        case ("optimizer", name) if OPTIMIZERS[name].of_matrices and parts.blocks_owner is None:
            return "it updates the matrices of blocks in another way, and the model has no blocks"
        case ("checkpointing", "attention") if parts.attention_name is None:
            return "no attention was found in the model's blocks"
        case ("checkpointing", "sqrt") if parts.blocks_are_called_alike is None:
            return (
                "it runs several blocks as one, and how the script's model calls its blocks is not "
                "known"
            )
        case ("checkpointing", "sqrt") if not parts.blocks_are_called_alike:
            return "it runs several blocks as one, and this model's take different arguments"
        case ("checkpointing", "sqrt") if len(set(parts.blocks)) < len(parts.blocks):
            return "it runs several blocks as one, and this model calls one block several times"
        case ("precision", name) if name in EIGHT_BIT_PRECISIONS and not _can_be_8_bit(parts):
            return (
                "no torch.nn.Linear in the model's blocks has sides that are multiples of "
                f"{FP8_MULTIPLE}"
            )
        case ("tensor_parallel", degree):
            return tensor_parallel.why_not(parts, degree)
        case ("feed_forward", "tiled"):
            return feed_forward.why_not(parts)
        case ("kernels", "liger"):
            return kernels.why_not(parts)
        case ("loss", "chunked") if parts.own_loss:
            return parts.own_loss
        case ("loss", "chunked") if parts.head is None:
            return "the model has no linear head that makes its logits"
    return None


@torch.no_grad()
def _logits_from_head(parts: ModelParts, *, if_unknown: bool) -> bool:
    """Returns whether the logits of the model are the unchanged output of one call of its head.

    A loss in chunks needs that, since it computes the logits itself. `if_unknown` is returned for a
    model that cannot run a forward pass over a few tokens here.
    """
    logits = getattr(parts.model, "logits", None)
    if logits is None:
        return True  # it calls its `token_loss` with a head that is known to compute the logits
    outputs: list[Tensor] = []
    assert parts.head is not None
    was_training = parts.model.training
    parts.model.eval()  # no dropout, which would draw from the training's random numbers

    def record_output(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        outputs.append(output)

    handle = parts.head.register_forward_hook(record_output)
    device = _device_of(parts.model)
    try:
        returned = logits(torch.zeros(1, _EXAMINED_TOKENS, dtype=torch.int64, device=device))
    except Exception:  # any error of a model that needs values, or more tokens
        return if_unknown
    finally:
        handle.remove()
        parts.model.train(was_training)
    return len(outputs) == 1 and outputs[0] is returned


def _unsupported_attention(
    parts: ModelParts, backends: Sequence[Any], *, device: torch.device, sequence_length: int
) -> dict[str, str]:
    """Returns {backend: reason} for backends that do not support every call of this model.

    Backends that do not work on `device` at all are left out.
    """
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
        for call in calls:
            reason = attention.unavailable(backend, device=device, call=call)
            if reason:
                found[backend] = f"it does not take this model's attention: {reason}"
                break
    return found


def _attention_calls(parts: ModelParts, sequence_length: int) -> list[AttentionCall] | str:
    """Returns the attention calls of one forward pass, or why they are not known."""
    tokens = torch.zeros(1, sequence_length, dtype=torch.int64, device=_device_of(parts.model))
    try:
        with CallsOfAttention() as collector:
            parts.model(tokens, tokens)
    except Exception as error:  # any error of a model that needs values
        return f"it cannot be seen how the model attends: {first_line_of(error)}"
    if not collector.calls:
        return "the model does not attend through scaled_dot_product_attention"
    return list(collector.calls)


def _can_be_8_bit(parts: ModelParts) -> bool:
    if parts.blocks_owner is None:
        return False
    return any(can_be_fp8(layer) for block in parts.blocks for layer in block.modules())


def _device_of(model: nn.Module) -> torch.device:
    return next(parameter.device for parameter in model.parameters())
