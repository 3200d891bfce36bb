"""The texts of the torchtitan target: a Python module for 0.3; a TOML file and a module that it imports for 0.2.

`done` is what the files are to do: the settings of a recipe, with what stands in for those that
were refused.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from autotune.exporters.recipe import OPTIMIZER_SETTINGS, SMALLEST_RATE, Recipe

ATTENTION_MODULE = "autotune_attention.py"

_IMPLEMENTATIONS = {
    "none": "for-loop",
    "foreach": "foreach",
    "kernel": "fused",
    "backward": "for-loop",
}
_KERNELS = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
    "cudnn": "CUDNN_ATTENTION",
}
"""In the order in which torch tries them."""


def module(recipe: Recipe, done: Mapping[str, Any]) -> str:
    """0.3: a function that returns the whole configuration."""
    adamw = {
        **OPTIMIZER_SETTINGS["adamw"],
        "lr": done["learning_rate"],
        "weight_decay": done["weight_decay"],
    }
    checkpoint, loss = _activation_checkpoint(done), _loss(done, recipe)
    values = {**_training(done), **_schedule(done), **_compile(done), "debug.seed": done["seed"]}
    values["training.disable_cuda_graphs"] = True
    values["optimizer.implementation"] = _IMPLEMENTATIONS[done["optimizer_fusion"]]
    lines = [
        f"c.model_spec = model_registry({_model(done)})",
        f"c.loss = {loss}",
        f"c.optimizer = default_adamw({', '.join(f'{name}={value!r}' for name, value in sorted(adamw.items()))})",
        f"c.activation_checkpoint = {checkpoint}",
        *(f"c.{key} = {_python(value)}" for key, value in values.items()),
    ]
    body = "\n    ".join(lines)
    return f'''# {recipe.origin}
"""A configuration of torchtitan 0.3's Trainer, for `--module autotune_export --config autotune`."""

{_imports(body)}

def autotune():
    c = llama3_debugmodel()  # put the configuration of your own model here
    {body}
    return c
'''


_PLACES = {
    "torchtitan.components.loss": ("ChunkedLossWrapper", "CrossEntropyLoss"),
    "torchtitan.components.optimizer": ("default_adamw",),
    "torchtitan.components.quantization.float8": ("Float8LinearConverter",),
    "torchtitan.distributed.activation_checkpoint": ("FullAC", "MemoryBudgetAC", "SelectiveAC"),
    "torchtitan.models.common.config_utils": ("decoder_vocab_size",),
    "torchtitan.models.llama3": ("model_registry",),
}


def _imports(body: str) -> str:
    lines = []
    for place, names in _PLACES.items():
        if used := [name for name in names if f"{name}(" in body or f"{name}." in body]:
            lines.append(f"from {place} import {', '.join(used)}\n")
    return "".join(
        [*lines, "from torchtitan.models.llama3.config_registry import llama3_debugmodel\n"]
    )


def _model(done: Mapping[str, Any]) -> str:
    backend = {"flash": "varlen", "flex": "flex"}[done["attention"]]
    words = ['"debugmodel"', f'attn_backend="{backend}"']
    if done["precision"] == "fp8 by rows":
        compiled = done["compile"] != "none"
        options = (
            f'recipe_name="rowwise", filter_fqns=["lm_head"], model_compile_enabled={compiled}'
        )
        words.append(f"converters=[Float8LinearConverter.Config({options})]")
    return ", ".join(words)


def _loss(done: Mapping[str, Any], recipe: Recipe) -> str:
    full = "CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(c.model_spec))"
    if done["loss"] == "full":
        return full
    return f"ChunkedLossWrapper.Config(num_chunks={chunks(recipe)}, loss_fn={full})"


def chunks(recipe: Recipe) -> int:
    """At least as many as in a trial (`autotune/techniques/loss.py`); torchtitan cuts the sequences, evenly."""
    workload = recipe.workload
    tokens = recipe.config.micro_batch_size * workload.sequence_length
    in_one = max(64, -(-tokens * workload.width // workload.vocab_size))
    wanted = min(max(8, -(-tokens // in_one)), workload.sequence_length)
    return next(
        n for n in range(wanted, workload.sequence_length + 1) if workload.sequence_length % n == 0
    )


def _activation_checkpoint(done: Mapping[str, Any]) -> str:
    if done["memory_budget"] != 1.0:
        return f"MemoryBudgetAC.Config(memory_budget={done['memory_budget']})"
    kinds = {
        "none": "None",
        "block": "FullAC.Config()",
        "selective, every second product": "SelectiveAC.Config()",
    }
    return kinds[done["checkpointing"]]


def _training(done: Mapping[str, Any]) -> dict[str, Any]:
    clipping = done["gradient_clipping"]
    return {
        "training.local_batch_size": done["micro_batch_size"],
        "training.global_batch_size": done["global_batch"],
        "training.seq_len": done["sequence_length"],
        "training.steps": done["steps"],
        "training.max_norm": math.inf if clipping is None else clipping,
        "training.dtype": "bfloat16" if done["precision"].startswith("bf16-true") else "float32",
        "training.mixed_precision_param": "float32"
        if done["precision"] in ("fp32", "tf32")
        else "bfloat16",
    }


def _schedule(done: Mapping[str, Any]) -> dict[str, Any]:
    """Steps at a decay ratio of 0 never decay; torchtitan would cut a warm-up that is longer than the training."""
    is_constant = done["schedule"] == "constant"
    return {
        "lr_scheduler.warmup_steps": done["learning_rate_warmup_steps"],
        "lr_scheduler.total_steps": max(done["steps"], done["learning_rate_warmup_steps"]),
        "lr_scheduler.decay_ratio": 0.0 if is_constant else None,
        "lr_scheduler.decay_type": "linear" if is_constant else "cosine",
        "lr_scheduler.min_lr_factor": 0.0 if is_constant else SMALLEST_RATE,
    }


def _compile(done: Mapping[str, Any]) -> dict[str, Any]:
    return {"compile.enable": done["compile"] != "none", "compile.components": ["model"]}


def _python(value: Any) -> str:
    return 'float("inf")  # no clipping' if value == math.inf else repr(value).replace("'", '"')


def toml(recipe: Recipe, done: Mapping[str, Any]) -> str:
    """0.2: a job configuration.

    A key without a value is left out: TOML has no None, and None is its default.
    """
    adamw = OPTIMIZER_SETTINGS["adamw"]
    values = {
        "model.name": "llama3",
        "model.flavor": "debugmodel",
        "model.converters": ["float8"] if done["precision"] == "fp8" else [],
        "experimental.custom_import": ATTENTION_MODULE.removesuffix(".py"),
        "optimizer.name": "AdamW",
        "optimizer.lr": done["learning_rate"],
        "optimizer.beta1": adamw["betas"][0],
        "optimizer.beta2": adamw["betas"][1],
        "optimizer.eps": adamw["eps"],
        "optimizer.weight_decay": done["weight_decay"],
        "optimizer.implementation": _IMPLEMENTATIONS[done["optimizer_fusion"]],
        "optimizer.early_step_in_backward": done["optimizer_fusion"] == "backward",
        **_training(done),
        **_schedule(done),
        **_activation_checkpoint_toml(done),
        **_compile(done),
        "debug.seed": done["seed"],
    }
    if done["precision"] == "fp8":
        values["quantize.linear.float8.filter_fqns"] = ["output"]
    return f"# {recipe.origin}\n# For torchtitan 0.2.\n{_sections(values)}"


def _activation_checkpoint_toml(done: Mapping[str, Any]) -> dict[str, Any]:
    kind = done["checkpointing"]
    words: dict[str, Any] = {"mode": {"none": "none", "block": "full"}.get(kind, "selective")}
    if kind.startswith("every-"):
        words["selective_ac_option"] = kind.removeprefix("every-").partition(" ")[0]
    elif kind.startswith("selective"):
        words["selective_ac_option"] = "op"
    elif done["memory_budget"] != 1.0:
        words = {"mode": "memory_budget", "memory_budget": done["memory_budget"]}
    return {f"activation_checkpoint.{name}": value for name, value in words.items()}


def _sections(values: Mapping[str, Any]) -> str:
    sections: dict[str, list[str]] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        if value is not None:
            text = str(value) if isinstance(value, float) else json.dumps(value)
            sections.setdefault(section, []).append(f"{name} = {text}\n")
    return "".join(f"\n[{section}]\n{''.join(lines)}" for section, lines in sections.items())


def attention_module(recipe: Recipe) -> str:
    """0.2: torchtitan names the kernels around every call, so that no setting of the process reaches it."""
    attention = recipe.config.attention
    kernels = [kernel for name, kernel in _KERNELS.items() if attention in ("auto", name)]
    return f'''# {recipe.origin}
"""The attention kernels that torchtitan 0.2 may choose from."""

from torch.nn.attention import SDPBackend
from torchtitan.models.attention import ScaledDotProductAttentionWrapper

ScaledDotProductAttentionWrapper.sdpa_backends = [{", ".join(f"SDPBackend.{kernel}" for kernel in kernels)}]
'''
