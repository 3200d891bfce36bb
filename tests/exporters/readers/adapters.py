"""Adapters and frozen weights of a model that peft has changed, as settings of autotune."""

import torch

NOTHING_BESIDE = {
    "adapter_dropout": 0.0,
    "adapter_alpha": 16,
    "adapter_scaling": "standard",
    "adapter_init": "standard",
    "adapter_rank_pattern": {},
    "adapter_alpha_pattern": {},
    "modules_to_save": (),
    "modules_to_save_dtype": "adapter",
}
UNTRAINED = {
    "adapter": "none",
    "adapter_rank": 8,
    "adapter_targets": "all-linear",
    "adapter_kernels": "none",
    "base_weights": "trained",
    **NOTHING_BESIDE,
}


def adapter_settings(model, blocks, attention):
    """Of a model, the list of its blocks and the name of their attention.

    Checks what is the same in all trials: that nothing else is trained.
    """
    layers = {name: part for name, part in model.named_modules() if hasattr(part, "lora_A")}
    if not layers:
        return UNTRAINED
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert all(".lora_" in name or ".modules_to_save." in name for name in trained)
    magnitudes = [name for name in trained if "magnitude" in name]
    assert len(magnitudes) in (0, len(layers))
    [is_fused] = {"_before" in vars(type(part)) for part in layers.values()}
    return {
        "adapter": "dora" if magnitudes else "lora",
        "adapter_kernels": "fused" if is_fused else "none",
        "adapter_rank": model.peft_config["default"].r,
        "adapter_targets": _targets(set(layers.values()), blocks, attention),
        "base_weights": _base_weights(model, blocks),
        **_beside(model, layers),
    }


def _second(layer):
    return layer.lora_B["default"].weight


def offload_of(blocks):
    """Returns the choice for frozen weights that come from the host; nothing where they do not."""
    [is_followed] = {hasattr(block, "_weights_on_host") for block in blocks}
    return {"offload": "frozen"} if is_followed else {}


def _beside(model, layers):
    """What drops the inputs of adapters, and what is trained whole beside them."""
    [dropout] = {getattr(part.lora_dropout["default"], "p", 0.0) for part in layers.values()}
    config = model.peft_config["default"]
    asked = config.modules_to_save or ()
    whole = {name: part for name, part in model.named_modules() if hasattr(part, "original_module")}
    assert {name.rpartition(".")[2] for name in whole} == {*asked}
    assert not any(one.requires_grad for part in whole.values() for one in _frozen(part))
    dtypes = {one.dtype for part in whole.values() for one in part.modules_to_save.parameters()}
    is_alike = dtypes <= {part.lora_A["default"].weight.dtype for part in layers.values()}
    return {
        "adapter_dropout": dropout,
        "adapter_alpha": config.lora_alpha,
        "adapter_scaling": "rslora" if config.use_rslora else "standard",
        "adapter_init": "pissa"
        if all(_second(part).any() for part in layers.values())
        else "standard",
        "adapter_rank_pattern": config.rank_pattern,
        "adapter_alpha_pattern": config.alpha_pattern,
        "modules_to_save": tuple(asked),
        "modules_to_save_dtype": "adapter" if is_alike else "base",
    }


def start_of(name):
    """Returns the setting for peft's `init_lora_weights`."""
    return {"pissa_niter_16": "pissa", "true": "standard", True: "standard"}[name]


def _frozen(part):
    return part.original_module.parameters()


def trained_dtype(model):
    """Returns the dtype of everything that is trained, but for what is whole beside adapters."""
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    [dtype] = {one.dtype for name, one in trained if ".modules_to_save." not in name}
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
        if ".lora_" not in name
        and ".modules_to_save." not in name
        and not name.endswith("proj.weight")
    }
    if kind in ("int8", "fp8", "nf4"):
        assert torch.float32 not in others, "what is not quantized is in 16 bits"
        return kind
    if trained_dtype(model) != kind:
        return {torch.bfloat16: "bf16", torch.float16: "fp16"}[kind]
    return "trained"


def _kind(weight):
    if type(weight).__name__ == "Params4bit":
        state = weight.quant_state
        assert state.nested
        return state.quant_type
    return {"Int8Tensor": "int8", "Float8Tensor": "fp8"}.get(type(weight).__name__, weight.dtype)
