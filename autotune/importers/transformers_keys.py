"""What keys of transformers' TrainingArguments mean, which several trainers have.

Source: https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/training_args.py
"""

from collections.abc import Mapping
from typing import Any

from autotune.importers.keys_of_file import KeysOfFile

OPTIMIZERS: Mapping[str, tuple[str, str]] = {
    "adamw_torch": ("adamw", "foreach"),
    "adamw_torch_fused": ("adamw", "kernel"),
    "adamw_hf": ("adamw", "foreach"),
    "adamw_torch_8bit": ("adamw-8bit", "none"),
    "ao_adamw_8bit": ("adamw-8bit", "none"),
    "adamw_bnb_8bit": ("adamw-8bit", "none"),
    "adamw_8bit": ("adamw-8bit", "none"),
    "ao_adamw_fp8": ("adamw-fp8", "none"),
    "paged_adamw_32bit": ("paged-adamw", "none"),
    "paged_adamw": ("paged-adamw", "none"),
    "paged_adamw_8bit": ("paged-adamw-8bit", "none"),
    "adafactor": ("adafactor-fixed-rate", "none"),
}
"""{name: optimizer and fusion}. On CUDA, where these trainers run, torch batches by itself."""
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "linear": "cosine",
}
"""{name of a schedule of the learning rate: ours}."""
ATTENTIONS = {
    "sdpa": "auto",
    "eager": "math",
    "flash_attention_2": "flash",
    "flash_attention_3": "flash",
    "flash": "flash",
    "xformers": "efficient",
}
"""{implementation: kernel behind scaled_dot_product_attention that keeps the same tensors}."""
_ATTENTION_LAYERS = frozenset(
    ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "query_key_value", "c_attn", "out_proj")
)


def optimizer(keys: KeysOfFile, key: str) -> dict[str, Any]:
    """Returns the choices for the name of an optimizer. Raises InvalidInput for one we lack."""
    name = str(keys[key])
    if name not in OPTIMIZERS:
        raise keys.cannot_train(
            key,
            "autotune has no such optimizer, and its state decides the memory",
            hint=f"save a copy of the file with one of {', '.join(OPTIMIZERS)}",
        )
    chosen, fusion = OPTIMIZERS[name]
    if name in ("adamw_bnb_8bit", "adamw_8bit"):
        keys.refuse(key, "adamw-8bit is torchao's, with as many bytes as that of bitsandbytes")
    return {"optimizer": chosen, "optimizer_fusion": fusion}


def learning(
    keys: KeysOfFile, *, optimizer: str, adapter: str, schedule_key: str
) -> dict[str, Any]:
    """Returns the settings of the rate, its schedule, clipping and the seed."""
    settings: dict[str, Any] = {}
    rate = keys.number("learning_rate")
    if rate:
        name = optimizer if adapter == "none" else f"{adapter}/{optimizer}"
        settings["learning_rates"] = {name: rate}
    schedule = str(keys[schedule_key])
    settings["schedule"] = SCHEDULES.get(schedule, "cosine")
    if settings["schedule"] != schedule.removesuffix("_with_warmup"):
        keys.refuse(
            schedule_key, f"trials have {settings['schedule']}, the nearest of two schedules"
        )
    clipping = keys.number("max_grad_norm")
    if clipping:
        settings["gradient_clipping"] = clipping
    seed = keys.whole_number("seed")
    if seed is not None:
        settings["seed"] = seed
    return settings


def checkpointing(keys: KeysOfFile, key: str, *, of_arguments: str) -> str:
    """Returns the technique for "recompute blocks in backward", with its arguments in a table."""
    if not keys.flag(key):
        return "none"
    every = keys.table_of(of_arguments).get("every_n_layers", 1)
    if every in (2, 4):
        return f"every-{every}"
    if every != 1:
        keys.refuse(of_arguments, f"of every {every} layers: trials recompute every second block")
        return "every-2"
    return "block"


def attention(keys: KeysOfFile, key: str, name: str) -> str:
    """Returns the kernel for an implementation of the attention."""
    if name not in ATTENTIONS:
        keys.refuse(key, "trials leave the kernel to torch")
    return ATTENTIONS.get(name, "auto")


def adapter_layers(keys: KeysOfFile, key: str, names: list[str] | str) -> str:
    """Returns which layers have adapters, for the names of layers or a pattern."""
    if names in ("all-linear", "all", ["all-linear"], ["all"]):
        return "all-linear"
    if isinstance(names, str):
        if "," not in names and not names.replace("_", "").isalnum():
            keys.refuse(key, "a pattern: trials put adapters on all linear layers of the blocks")
            return "all-linear"
        names = [name.strip() for name in names.split(",")]
    layers = {str(name).rpartition(".")[2] for name in names}
    if layers <= _ATTENTION_LAYERS:
        if len(layers) not in (1, 4):
            keys.refuse(key, "trials put adapters on all layers of the attention")
        return "attention"
    if "lm_head" in layers or "embed_tokens" in layers:
        keys.refuse(key, "trials put adapters on the linear layers of the blocks alone")
    return "all-linear"
