"""Keys of transformers' TrainingArguments, which trl and others share, and what of a configuration they can say.

A key that loads need not be one that acts: transformers before 5.16 takes `every_n_layers` and
checkpoints every layer. So what the keys really do is worked out first, by `nearest`, and the keys
are written from that.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.exporters.recipe import SMALLEST_RATE, Recipe
from autotune.spec.config import Checkpointing, OptimizerFusion, TrainingConfig

_EVERY: Mapping[Checkpointing, int] = {"block": 1, "every-2": 2, "every-4": 4}
LONGEST_ADAFACTOR_STEPS = 5623
"""Until then transformers' Adafactor, which has no largest beta2, is adafactor-fixed-rate: 1 - 5623
** -0.8 < 0.999."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """What the keys do in the place of what the trial did."""

    setting: str
    instead: Any
    why: str


def nearest(
    recipe: Recipe, *, has_every_n_layers: bool = True
) -> tuple[TrainingConfig, list[Change]]:
    """The configuration that TrainingArguments and a model's `dtype` can say, and where it is another.

    The settings of a process (`launch.py`) are left as they are.
    """
    config = recipe.config
    changes = [
        *_precision(recipe),
        *_checkpointing(config, has_every_n_layers=has_every_n_layers),
        *_compile(config),
        *_optimizer(recipe),
    ]
    changes += _fusion(config, _changed(config, changes), recipe.device_type)
    said = _changed(config, changes)
    return said, [*changes, *_learning_rate(recipe, said)]


FP16_ON_CPU = (
    "accelerate, which it trains by, leaves fp16 out on a CPU without a word: use bf16-mixed"
)


def _changed(config: TrainingConfig, changes: list[Change]) -> TrainingConfig:
    return dataclasses.replace(config, **{change.setting: change.instead for change in changes})


def _precision(recipe: Recipe) -> list[Change]:
    config = recipe.config
    if recipe.is_fp16_on_cpu:
        return [Change(setting="precision", instead="fp32", why=FP16_ON_CPU)]
    if config.precision == "fp8":
        why = "it has no key: convert the blocks' linear layers by torchao.float8, or use accelerate's fp8"
        return [Change(setting="precision", instead="bf16-mixed", why=why)]
    if config.precision == "bf16-stochastic":
        why = "no optimizer of its list rounds weights and state stochastically"
        return [Change(setting="precision", instead="bf16-true", why=why)]
    return []


def _checkpointing(config: TrainingConfig, *, has_every_n_layers: bool) -> list[Change]:
    value = config.checkpointing
    if value in ("none", "block") or (value in _EVERY and has_every_n_layers):
        return []
    why = {
        "attention": "it checkpoints whole blocks only",
        "selective": "a policy of what to keep is a function, which no file can hold",
        "sqrt": "it checkpoints single blocks only",
    }.get(value, "`every_n_layers` came with transformers 5.16 and is silently ignored before")
    return [Change(setting="checkpointing", instead="block", why=why)]


def _compile(config: TrainingConfig) -> list[Change]:
    if config.compile != "block":
        return []
    return [
        Change(setting="compile", instead="model", why="torch_compile compiles the whole model")
    ]


def _optimizer(recipe: Recipe) -> list[Change]:
    config = recipe.config
    if config.optimizer != "adafactor":
        return []
    why = "its adafactor is another algorithm than torch.optim.Adafactor: its rate is not relative to the weight's size"
    return [Change(setting="optimizer", instead="adafactor-fixed-rate", why=why)]


def _fusion(config: TrainingConfig, said: TrainingConfig, device_type: str) -> list[Change]:
    by_torch: OptimizerFusion = "foreach" if device_type == "cuda" else "none"
    possible: Mapping[str, tuple[OptimizerFusion, ...]] = {
        "adamw": (by_torch, "kernel"),
        "sgd": (by_torch,),
    }
    options = possible.get(said.optimizer, ("none",))
    if config.optimizer_fusion in options:
        return []
    why = {
        "backward": "it steps after the backward pass",
        "kernel": f"{said.optimizer} has no key for fused=True",
    }.get(
        config.optimizer_fusion,
        f"torch chooses for itself where nothing is said, on {device_type} {by_torch}",
    )
    return [Change(setting="optimizer_fusion", instead=options[-1], why=why)]


def _learning_rate(recipe: Recipe, said: TrainingConfig) -> list[Change]:
    was, now = (
        recipe.workload.learning_rate_of(config.optimizer) for config in (recipe.config, said)
    )
    why = f"it is the workload's rate for {said.optimizer}"
    return [Change(setting="learning_rate", instead=now, why=why)] if now != was else []


def training_keys(
    recipe: Recipe, said: TrainingConfig, *, new_names: bool = False
) -> dict[str, Any]:
    """{key: value} that do what `said`, of `nearest`, says.

    `new_names`: activation_checkpointing, of 5.23.
    """
    return {
        **_batch_keys(recipe),
        **optimizer_keys(recipe, said),
        **schedule_keys(recipe),
        "bf16": said.precision == "bf16-mixed",
        "fp16": said.precision == "fp16-mixed",
        **(
            {"use_cpu": True} if recipe.device_type == "cpu" else {}
        ),  # it refuses bf16 there where nothing is said
        "tf32": said.precision == "tf32",
        **checkpointing_keys(said.checkpointing, new_names=new_names),
        **_compile_keys(said),
        "seed": recipe.workload.seed,
        "data_seed": recipe.workload.seed,
    }


def _batch_keys(recipe: Recipe) -> dict[str, Any]:
    return {
        "max_steps": recipe.workload.steps,
        "per_device_train_batch_size": recipe.config.micro_batch_size,
        "gradient_accumulation_steps": recipe.accumulation_steps,
    }


def optimizer_keys(recipe: Recipe, said: TrainingConfig) -> dict[str, Any]:
    settings = recipe.optimizer_settings
    names = {"adamw": "adamw_torch", "adamw-8bit": "adamw_torch_8bit", "sgd": "sgd"}
    name = names.get(said.optimizer, "adafactor")
    betas = settings.get("betas")
    return {
        "optim": "adamw_torch_fused"
        if (name, said.optimizer_fusion) == ("adamw_torch", "kernel")
        else name,
        **({"optim_args": f"momentum={settings['momentum']}"} if name == "sgd" else {}),
        **(
            {"adam_beta1": betas[0], "adam_beta2": betas[1], "adam_epsilon": settings["eps"]}
            if betas
            else {}
        ),
        "learning_rate": recipe.workload.learning_rate_of(said.optimizer),
        "weight_decay": settings["weight_decay"],
        "max_grad_norm": recipe.workload.gradient_clipping
        or 0.0,  # 0 is no limit; without a word it is 1
    }


def schedule_keys(recipe: Recipe) -> dict[str, Any]:
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
    name = "activation_checkpointing" if new_names else "gradient_checkpointing"
    if checkpointing not in _EVERY:
        return {name: False}
    every = _EVERY[checkpointing]
    return {
        name: True,
        f"{name}_kwargs": {
            "use_reentrant": False,
            **({"every_n_layers": every} if every > 1 else {}),
        },
    }


def _compile_keys(said: TrainingConfig) -> dict[str, Any]:
    if said.compile == "none":
        return {"torch_compile": False}
    return {
        "torch_compile": True,
        "torch_compile_backend": "inductor",
        "torch_compile_mode": "default",
    }


def weights_dtype(config: TrainingConfig) -> str:
    return "bfloat16" if config.precision in ("bf16-true", "bf16-stochastic") else "float32"


def model_keys(config: TrainingConfig) -> dict[str, Any]:
    """Arguments of `from_pretrained`. Without a dtype it would keep that of the files."""
    return {"dtype": weights_dtype(config), "attn_implementation": "sdpa"}


KEY_NOTES = (
    "weight_decay leaves out norms and biases, where the trial had none of them left out",
    "the learning rate rises one step later than in the trial, from 0",
)
"""Where the same key means a little less in transformers' own optimizers and schedules."""
