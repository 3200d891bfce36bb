"""Adapters and frozen weights of a model that peft has changed, as settings of autotune."""

import torch

UNTRAINED = {
    "adapter": "none",
    "adapter_rank": 8,
    "adapter_targets": "all-linear",
    "base_weights": "trained",
}


def adapter_settings(model, blocks, attention):
    """Of a model, the list of its blocks and the name of their attention.

    Checks what is the same in all trials: alpha, no dropout, nothing else that is trained.
    """
    layers = {name: part for name, part in model.named_modules() if hasattr(part, "lora_A")}
    if not layers:
        return UNTRAINED
    ranks = {part.r["default"] for part in layers.values()}
    [rank] = ranks
    assert {part.scaling["default"] for part in layers.values()} == {16 / rank}
    assert {type(part.lora_dropout["default"]).__name__ for part in layers.values()} == {"Identity"}
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert all(".lora_" in name for name in trained)
    magnitudes = [name for name in trained if "magnitude" in name]
    assert len(magnitudes) in (0, len(layers))
    return {
        "adapter": "dora" if magnitudes else "lora",
        "adapter_rank": rank,
        "adapter_targets": _targets(set(layers.values()), blocks, attention),
        "base_weights": _base_weights(model, blocks),
    }


def trained_dtype(model):
    """Returns the dtype of everything that is trained."""
    [dtype] = {weight.dtype for weight in model.parameters() if weight.requires_grad}
    return dtype


def _targets(adapted, blocks, attention):
    linear = {part for part in blocks.modules() if hasattr(part, "lora_A") or _is_plain(part)}
    inside = {
        part for block in blocks for part in getattr(block, attention).modules() if part in adapted
    }
    # peft keeps the layer itself, and its matrices are linear layers, too.
    linear -= {inner for part in linear for inner in part.modules() if inner is not part}
    if adapted == linear:
        return "all-linear"
    assert adapted == inside
    assert not any(
        _is_plain(one) for block in blocks for one in getattr(block, attention).children()
    )
    return "attention"


def _is_plain(part):
    return isinstance(part, torch.nn.Linear)


def _base_weights(model, blocks):
    kinds = set()
    for name, part in blocks.named_modules():
        if _is_plain(part) and ".lora_" not in name:
            kinds.add(_kind(part.weight))
    [kind] = kinds
    others = {
        weight.dtype
        for name, weight in model.named_parameters()
        if ".lora_" not in name and not name.endswith("proj.weight")
    }
    if kind in ("int8", "fp8", "nf4"):
        assert torch.float32 not in others, "what is not quantized is in 16 bits"
        return kind
    if kind == torch.bfloat16 and trained_dtype(model) != kind:
        return "bf16"
    return "trained"


def _kind(weight):
    if type(weight).__name__ == "Params4bit":
        state = weight.quant_state
        assert state.nested
        return state.quant_type
    return {"Int8Tensor": "int8", "Float8Tensor": "fp8"}.get(type(weight).__name__, weight.dtype)
