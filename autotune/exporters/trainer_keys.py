"""Keys of transformers' TrainingArguments, which trl and others share, for a configuration.

A key that is accepted may have no effect: transformers before 5.16 takes `every_n_layers` and
checkpoints every layer. So `closest_config` first works out what the keys can really do, and the
keys are written from its result.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from autotune.exporters.adapters import base_dtype, is_quantized, quantization_settings
from autotune.exporters.reasons import WITH_MODES, Reason, Table, Values, reasons_in, unknown_values
from autotune.exporters.recipe import SMALLEST_RATE, Recipe
from autotune.spec.config import (
    SELECTIVE,
    Checkpointing,
    Loss,
    OptimizerFusion,
    TrainingConfig,
)
from autotune.spec.optimizers import OPTIMIZERS

_EVERY: Mapping[Checkpointing, int] = {"block": 1, "every-2": 2, "every-4": 4}
LONGEST_ADAFACTOR_STEPS = 5623
"""Last step at which transformers' Adafactor equals adafactor-fixed-rate.

The former has no largest beta2; 1 - 5623 ** -0.8 < 0.999, the largest beta2 of the latter.
"""


_NO_APOLLO = (
    "its apollo_adamw needs the package apollo-torch, which may not be used commercially, and has "
    "one rank for the matrices of all sizes"
)
OF_OTHER_PACKAGES: Mapping[str, Reason] = {
    "apollo": ("adamw", _NO_APOLLO),
    "apollo-mini": ("adamw", _NO_APOLLO),
    "adamw-bf16": (
        "adamw",
        "its adamw_anyprecision needs torchdistx, which is in no registry, and rounds moments in "
        "bf16 to nearest",
    ),
}
"""{optimizer: what is used instead, and why} of those that transformers has from packages."""
FP16_ON_CPU = "accelerate, which it trains with, silently ignores fp16 on a CPU: use bf16-mixed"
_LACKING: Table = {
    "precision": {
        "fp8": (
            "bf16-mixed",
            "it has no key: convert the linear layers of the blocks with torchao.float8, or use "
            "accelerate's fp8",
        ),
        "int8-mixed": (
            "bf16-mixed",
            "it has no products in int8: autotune_blocks.py of the accelerate export has them",
        ),
        "bf16-stochastic": (
            "bf16-true",
            "none of its optimizers rounds weights and state stochastically",
        ),
    },
    "checkpointing": {
        "attention": ("block", "it checkpoints whole blocks only"),
        **dict.fromkeys(
            SELECTIVE, ("block", "a policy of what to save is a function, which no file can hold")
        ),
        "sqrt": ("block", "it checkpoints single blocks only"),
    },
    "compile": {"block": ("model", "torch_compile compiles the whole model")},
    "optimizer": {
        "adafactor": (
            "adafactor-fixed-rate",
            "its adafactor is not the algorithm of torch.optim.Adafactor: its learning rate is not "
            "relative to the size of the weight",
        ),
        **OF_OTHER_PACKAGES,
        "muon": (
            "adamw",
            "transformers has no key for it, and of the trainers around it LLaMA-Factory alone has "
            "the trial's, by use_muon: true",
        ),
    },
}
_OPTIMIZERS = {
    "adamw": "adamw_torch",
    "adamw-8bit": "adamw_torch_8bit",
    "adamw-4bit": "adamw_torch_4bit",
    "paged-adamw": "paged_adamw_32bit",
    "paged-adamw-8bit": "paged_adamw_8bit",
    "sgd": "sgd",
    "adafactor-fixed-rate": "adafactor",
}
HAS: Values = {
    **WITH_MODES,
    "optimizer": (*_OPTIMIZERS, *_LACKING["optimizer"]),
    "kernels": ("liger",),
}
_NO_EVERY = ("block", "transformers before 5.16 silently ignores `every_n_layers`")


def closest_config(
    recipe: Recipe,
    *,
    has_every_n_layers: bool = True,
    has_muon: bool = False,
    has: Values = HAS,
) -> tuple[TrainingConfig, dict[str, Reason]]:
    """Returns the closest configuration that TrainingArguments and a model's `dtype` can express.

    `has` is what the trainer that has them writes or has a reason for; `has_muon` is whether that
    trainer has the trial's muon by a key of its own.
    The second value says where it differs from the trial's. The settings of a process
    (`launch.py`) are not changed.
    """
    config = recipe.config
    unknown = unknown_values(config, has, trainer="TrainingArguments")
    reasons = {**unknown, **reasons_in(_LACKING, config)}
    if has_muon and config.optimizer == "muon":
        del reasons["optimizer"]
    if recipe.is_fp16_on_cpu:
        reasons = {"precision": ("fp32", FP16_ON_CPU), **reasons}
    if config.checkpointing in ("every-2", "every-4") and not has_every_n_layers:
        reasons["checkpointing"] = _NO_EVERY
    fusion = _fusion(config, replaced(config, reasons), recipe.device_type)
    if fusion is not None:
        reasons["optimizer_fusion"] = fusion
    closest = replaced(config, reasons)
    used = recipe.workload.learning_rate_of(config.optimizer, config.adapter)
    instead = recipe.workload.learning_rate_of(closest.optimizer, closest.adapter)
    if instead != used:
        why = f"it is the workload's rate for {closest.optimizer}"
        reasons["learning_rate"] = (instead, why)
    return closest, reasons


def masked_attention(
    config: TrainingConfig, closest: TrainingConfig, *, is_padded: bool
) -> dict[str, Reason]:
    """Returns {setting: reason} of kernels that `closest` cannot use, as its batches have a mask.

    Trainers that make batches from texts give models an attention_mask. transformers drops one that
    masks nothing, but not in compiled code, nor where texts of a batch are padded (`is_padded`).
    """
    if config.attention not in ("flash", "cudnn"):
        return {}
    if is_padded and config.micro_batch_size > 1:
        why = "its batches are padded, and have a mask, which this kernel does not take"
        return {"attention": ("auto", why)}
    if closest.compile == "none":
        return {}
    why = (
        "its batches have an attention_mask, which compiled code turns into a mask, and this "
        "kernel takes none"
    )
    return {"attention": ("auto", why)}


def replaced(config: TrainingConfig, reasons: Mapping[str, Reason]) -> TrainingConfig:
    """Returns the configuration with what the keys do instead."""
    instead = {setting: value for setting, (value, _) in reasons.items()}
    return dataclasses.replace(config, **instead)


def _fusion(config: TrainingConfig, closest: TrainingConfig, device_type: str) -> Reason | None:
    torch_default: OptimizerFusion = "foreach" if device_type == "cuda" else "none"
    possible: Mapping[str, tuple[OptimizerFusion, ...]] = {
        "adamw": (torch_default, "kernel"),
        "sgd": (torch_default,),
    }
    options = possible.get(closest.optimizer, ("none",))
    if config.optimizer_fusion in options:
        return None
    if config.optimizer_fusion == "backward":
        why = "it steps after the backward pass"
    elif config.optimizer_fusion == "kernel":
        why = f"{closest.optimizer} has no key for fused=True"
    else:
        why = f"it has no key for this; the default of torch on {device_type} is {torch_default}"
    return options[-1], why


def training_keys(
    recipe: Recipe, closest: TrainingConfig, *, new_names: bool = False
) -> dict[str, Any]:
    """Returns {key: value} that do what `closest`, the result of `closest_config`, specifies.

    `new_names` selects activation_checkpointing, the name since 5.23, for gradient_checkpointing.
    """
    # DeepSpeed's file has autocast; here it would stand for 16-bit weights with a float32 copy.
    autocast = "" if recipe.config.engine == "deepspeed" else closest.precision
    keys = {
        **_batch_keys(recipe),
        **optimizer_keys(recipe, closest),
        **schedule_keys(recipe),
        "bf16": autocast == "bf16-mixed",
        "fp16": autocast == "fp16-mixed",
    }
    if recipe.device_type == "cpu":
        keys["use_cpu"] = True  # without it bf16 is rejected on a CPU
    return {
        **keys,
        "tf32": closest.precision == "tf32",
        **checkpointing_keys(closest.checkpointing, new_names=new_names),
        **_compile_keys(closest),
        **_liger_keys(closest),
        "seed": recipe.workload.seed,
        "data_seed": recipe.workload.seed,
    }


def _batch_keys(recipe: Recipe) -> dict[str, Any]:
    return {
        "max_steps": recipe.workload.steps,
        "per_device_train_batch_size": recipe.config.micro_batch_size,
        "gradient_accumulation_steps": recipe.accumulation_steps,
    }


def optimizer_keys(recipe: Recipe, closest: TrainingConfig) -> dict[str, Any]:
    """Returns the keys of the optimizer, its learning rate and gradient clipping."""
    settings = OPTIMIZERS[closest.optimizer].settings
    # A trainer with muon has a key of its own for it, and takes the numbers of its AdamW from here.
    name = _OPTIMIZERS["adamw" if closest.optimizer == "muon" else closest.optimizer]
    if name == "adamw_torch" and closest.optimizer_fusion == "kernel":
        name = "adamw_torch_fused"
    keys: dict[str, Any] = {"optim": name}
    if name == "sgd":
        keys["optim_args"] = f"momentum={settings['momentum']}"
    if "betas" in settings:
        keys["adam_beta1"], keys["adam_beta2"] = settings["betas"]
        keys["adam_epsilon"] = settings["eps"]
    return {
        **keys,
        "learning_rate": recipe.workload.learning_rate_of(closest.optimizer, closest.adapter),
        "weight_decay": recipe.optimizer.settings["weight_decay"],
        # 0 is no limit; the default is 1.
        "max_grad_norm": recipe.workload.gradient_clipping or 0.0,
    }


def schedule_keys(recipe: Recipe) -> dict[str, Any]:
    """Returns the keys of the learning rate schedule."""
    workload = recipe.workload
    if workload.schedule == "constant":
        kind: dict[str, Any] = {"lr_scheduler_type": "constant_with_warmup"}
    else:
        kind = {
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": SMALLEST_RATE},
        }
    return {**kind, "warmup_steps": workload.learning_rate_warmup_steps}


def checkpointing_keys(checkpointing: Checkpointing, *, new_names: bool = False) -> dict[str, Any]:
    """Returns the keys of activation checkpointing: off where no key can express it."""
    name = "activation_checkpointing" if new_names else "gradient_checkpointing"
    if checkpointing not in (*_EVERY, "save-attention"):
        return {name: False}
    arguments: dict[str, Any] = {"use_reentrant": False}
    if checkpointing == "save-attention":
        arguments["selective"] = True  # a key of trl only
    elif _EVERY[checkpointing] > 1:
        arguments["every_n_layers"] = _EVERY[checkpointing]
    return {name: True, f"{name}_kwargs": arguments}


def _compile_keys(closest: TrainingConfig) -> dict[str, Any]:
    if closest.compile == "none":
        return {"torch_compile": False}
    keys = {"torch_compile": True, "torch_compile_backend": "inductor"}
    if closest.compile_mode != "default":
        keys["torch_compile_mode"] = closest.compile_mode
    return keys


def _liger_keys(closest: TrainingConfig) -> dict[str, Any]:
    if closest.kernels == "none":
        return {}
    # Its loss is a choice of its own.
    without_loss = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    return {"use_liger_kernel": True, "liger_kernel_config": without_loss}


def without_liger_config(keys: dict[str, Any], config: TrainingConfig, key: str) -> dict[str, Any]:
    """Returns the keys of a trainer that has all of Liger's kernels by one key, or none."""
    left = {name: value for name, value in keys.items() if "liger" not in name}
    return {**left, **({key: True} if config.kernels == "liger" else {})}


def loss_with_liger(config: TrainingConfig, key: str) -> dict[str, Reason]:
    """Returns where such a trainer has another form of the loss, which is one of those kernels."""
    with_kernels: Loss = "full" if config.kernels == "none" else "chunked"
    if config.loss == with_kernels:
        return {}
    why = f"its {key}: true computes the loss in chunks as well"
    if config.loss == "chunked":
        why = (
            f"its {key}: true computes the loss in chunks, for the models that Liger knows, and "
            "replaces their norms, activations and rotary embeddings as well"
        )
    return {"loss": (with_kernels, why)}


def model_keys(config: TrainingConfig) -> dict[str, Any]:
    """Returns arguments of `from_pretrained`, which would use the dtype of the files by default."""
    keys: dict[str, Any] = {"dtype": base_dtype(config), "attn_implementation": "sdpa"}
    if is_quantized(config):
        keys["quantization_config"] = quantization_settings(config)
    return keys


KEY_NOTES = (
    "weight_decay excludes norms and biases, which the trial included",
    "the learning rate rises one step later than in the trial, from 0",
)
"""Differences of transformers' optimizers and schedules that no key can remove."""
