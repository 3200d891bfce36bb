"""Texts of the torchtitan target: a Python module for 0.3, a TOML file and a module for 0.2.

`effective` holds the settings of a recipe as the files will have them: those that cannot be
expressed are replaced by what the files do instead.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from autotune.exporters.recipe import SMALLEST_RATE, Recipe
from autotune.spec.optimizers import OPTIMIZERS

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
"""{value of `attention`: name in torch}, in the order in which torch tries them."""


_ATTENTION_LAYERS = ("wqkv", "wo")
_FEED_FORWARD_LAYERS = ("w1", "w2", "w3")
"""The last names of the linear layers in the blocks of torchtitan's models."""


def module(recipe: Recipe, effective: Mapping[str, Any]) -> str:
    """Returns the module for 0.3: a function that returns the whole configuration."""
    adamw = {
        **OPTIMIZERS["adamw"].settings,
        "lr": effective["learning_rate"],
        "weight_decay": effective["weight_decay"],
    }
    adamw_arguments = ", ".join(f"{name}={value!r}" for name, value in sorted(adamw.items()))
    values = {
        **_training(effective),
        **_devices(effective),
        **_schedule(effective),
        **_compile(effective),
        "debug.seed": effective["seed"],
        "training.disable_cuda_graphs": True,
        "optimizer.implementation": _IMPLEMENTATIONS[effective["optimizer_fusion"]],
    }
    lines = [
        f"c.model_spec = model_registry({_model(effective)})",
        f"c.loss = {_loss(effective, recipe)}",
        f"c.optimizer = default_adamw({adamw_arguments})",
        f"c.activation_checkpoint = {_activation_checkpoint(effective)}",
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


_MODULES = {
    "torchtitan.components.lora": ("LoRAConverter",),
    "torchtitan.components.loss": ("ChunkedLossWrapper", "CrossEntropyLoss"),
    "torchtitan.components.optimizer": ("default_adamw",),
    "torchtitan.components.quantization.float8": ("Float8LinearConverter",),
    "torchtitan.distributed.activation_checkpoint": ("FullAC", "MemoryBudgetAC", "SelectiveAC"),
    "torchtitan.models.common.config_utils": ("decoder_vocab_size",),
    "torchtitan.models.llama3": ("model_registry",),
}


def _imports(body: str) -> str:
    """Returns the imports of the names that `body` uses."""
    lines = []
    for module_name, names in _MODULES.items():
        used = [name for name in names if f"{name}(" in body or f"{name}." in body]
        if used:
            lines.append(f"from {module_name} import {', '.join(used)}\n")
    lines.append("from torchtitan.models.llama3.config_registry import llama3_debugmodel\n")
    return "".join(lines)


def _model(effective: Mapping[str, Any]) -> str:
    backend = {"flash": "varlen", "flex": "flex"}[effective["attention"]]
    arguments = ['"debugmodel"', f'attn_backend="{backend}"']
    if effective["precision"] == "fp8 by rows":
        compiled = effective["compile"] != "none"
        options = (
            f'recipe_name="rowwise", filter_fqns=["lm_head"], model_compile_enabled={compiled}'
        )
        arguments.append(f"converters=[Float8LinearConverter.Config({options})]")
    if effective["adapter"] != "none":
        layers = list(_ATTENTION_LAYERS)
        if effective["adapter_targets"] == "all-linear":
            layers += _FEED_FORWARD_LAYERS
        alpha = effective["adapter_alpha"]
        options = f"rank={effective['adapter_rank']}, alpha={float(alpha)}, target_modules={layers}"
        arguments.append(f"converters=[LoRAConverter.Config({options})]")
    return ", ".join(arguments)


def _loss(effective: Mapping[str, Any], recipe: Recipe) -> str:
    full = "CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(c.model_spec))"
    if effective["loss"] == "full":
        return full
    return f"ChunkedLossWrapper.Config(num_chunks={chunks(recipe)}, loss_fn={full})"


def chunks(recipe: Recipe) -> int:
    """Returns the number of chunks of the loss: at least that of a trial.

    The number of a trial is in `autotune/techniques/loss.py`. torchtitan cuts sequences evenly, so
    the number must divide the sequence length.
    """
    workload = recipe.workload
    length = workload.sequence_length
    tokens = recipe.config.micro_batch_size * length
    tokens_per_chunk = 64  # the least, for a model whose width is not known
    if workload.width is not None:
        tokens_per_chunk = max(64, -(-tokens * workload.width // workload.vocab_size))
    least = min(max(8, -(-tokens // tokens_per_chunk)), length)
    return next(number for number in range(least, length + 1) if length % number == 0)


def _activation_checkpoint(effective: Mapping[str, Any]) -> str:
    if effective["memory_budget"] != 1.0:
        return f"MemoryBudgetAC.Config(memory_budget={effective['memory_budget']})"
    kinds = {
        "none": "None",
        "block": "FullAC.Config()",
        "selective-2": "SelectiveAC.Config()",
    }
    return kinds[effective["checkpointing"]]


def _training(effective: Mapping[str, Any]) -> dict[str, Any]:
    clipping = effective["gradient_clipping"]
    is_float32 = effective["precision"] in ("fp32", "tf32")
    return {
        "training.local_batch_size": effective["micro_batch_size"],
        "training.global_batch_size": effective["global_batch"],
        "training.seq_len": effective["sequence_length"],
        "training.steps": effective["steps"],
        "training.max_norm": math.inf if clipping is None else clipping,
        "training.dtype": "bfloat16"
        if effective["precision"].startswith("bf16-true")
        else "float32",
        "training.mixed_precision_param": "float32" if is_float32 else "bfloat16",
    }


def _devices(effective: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the degrees: how many devices there are along each direction."""
    split = effective["tensor_parallel"]
    replicas = effective["devices_per_trial"] // split
    shards = {"none": 1, "ddp": 1, "hsdp": effective["sharding_group"]}
    shard_degree = shards.get(effective["sharding"], replicas)
    return {
        "parallelism.data_parallel_replicate_degree": replicas // shard_degree,
        "parallelism.data_parallel_shard_degree": shard_degree,
        "parallelism.fsdp_reshard_after_forward": (
            "never" if effective["sharding"] == "zero2" else "always"
        ),
        "parallelism.tensor_parallel_degree": split,
        "training.enable_cpu_offload": effective["offload"] == "all",
    }


def _schedule(effective: Mapping[str, Any]) -> dict[str, Any]:
    is_constant = effective["schedule"] == "constant"
    # With a decay ratio of 0 the rate never decays. torchtitan would cut a warm-up that is longer
    # than total_steps.
    return {
        "lr_scheduler.warmup_steps": effective["learning_rate_warmup_steps"],
        "lr_scheduler.total_steps": max(
            effective["steps"], effective["learning_rate_warmup_steps"]
        ),
        "lr_scheduler.decay_ratio": 0.0 if is_constant else None,
        "lr_scheduler.decay_type": "linear" if is_constant else "cosine",
        "lr_scheduler.min_lr_factor": 0.0 if is_constant else SMALLEST_RATE,
    }


def _compile(effective: Mapping[str, Any]) -> dict[str, Any]:
    return {"compile.enable": effective["compile"] != "none", "compile.components": ["model"]}


def _python(value: Any) -> str:
    if value == math.inf:
        return 'float("inf")  # no clipping'
    return repr(value).replace("'", '"')


def toml(recipe: Recipe, effective: Mapping[str, Any]) -> str:
    """Returns the job configuration for 0.2.

    Keys with the value None are omitted: TOML has no None, and it is their default.
    """
    adamw = OPTIMIZERS["adamw"].settings
    values = {
        "model.name": "llama3",
        "model.flavor": "debugmodel",
        "model.converters": ["float8"] if effective["precision"].startswith("fp8") else [],
        "experimental.custom_import": ATTENTION_MODULE.removesuffix(".py"),
        "optimizer.name": "AdamW",
        "optimizer.lr": effective["learning_rate"],
        "optimizer.beta1": adamw["betas"][0],
        "optimizer.beta2": adamw["betas"][1],
        "optimizer.eps": adamw["eps"],
        "optimizer.weight_decay": effective["weight_decay"],
        "optimizer.implementation": _IMPLEMENTATIONS[effective["optimizer_fusion"]],
        "optimizer.early_step_in_backward": effective["optimizer_fusion"] == "backward",
        **_training(effective),
        **_devices(effective),
        **_schedule(effective),
        **_activation_checkpoint_toml(effective),
        **_compile(effective),
        "debug.seed": effective["seed"],
    }
    if effective["precision"].startswith("fp8"):
        values["quantize.linear.float8.filter_fqns"] = ["output"]
    return f"# {recipe.origin}\n# For torchtitan 0.2.\n{_sections(values)}"


def _activation_checkpoint_toml(effective: Mapping[str, Any]) -> dict[str, Any]:
    kind = effective["checkpointing"]
    keys: dict[str, Any] = {"mode": {"none": "none", "block": "full"}.get(kind, "selective")}
    if kind.startswith("every-"):
        keys["selective_ac_option"] = kind.removeprefix("every-").partition(" ")[0]
    elif kind == "selective-2":
        keys["selective_ac_option"] = "op"
    elif effective["memory_budget"] != 1.0:
        keys = {"mode": "memory_budget", "memory_budget": effective["memory_budget"]}
    return {f"activation_checkpoint.{name}": value for name, value in keys.items()}


def _sections(values: Mapping[str, Any]) -> str:
    sections: dict[str, list[str]] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        if value is not None:
            text = str(value) if isinstance(value, float) else json.dumps(value)
            sections.setdefault(section, []).append(f"{name} = {text}\n")
    return "".join(f"\n[{section}]\n{''.join(lines)}" for section, lines in sections.items())


def attention_module(recipe: Recipe) -> str:
    """Returns the module for 0.2 that chooses the attention kernels.

    torchtitan selects the kernels at every call, so settings of the process have no effect on it.
    """
    attention = recipe.config.attention
    kernels = [kernel for name, kernel in _KERNELS.items() if attention in ("auto", name)]
    lines = "".join(f"    SDPBackend.{kernel},\n" for kernel in kernels)
    return f'''# {recipe.origin}
"""The attention kernels that torchtitan 0.2 may choose from."""

from torch.nn.attention import SDPBackend
from torchtitan.models.attention import ScaledDotProductAttentionWrapper

ScaledDotProductAttentionWrapper.sdpa_backends = [
{lines}]
'''
