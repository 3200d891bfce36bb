"""What keys of transformers' TrainingArguments mean, which several trainers have.

Source: https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/training_args.py
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autotune.errors import suggestion
from autotune.importers import accelerate_file, deepspeed_file
from autotune.importers.keys_of_file import KeysOfFile
from autotune.importers.several_devices import Plan, Sharing
from autotune.spec.adapters import PISSA
from autotune.spec.config import CHOICES, FULL_PRECISIONS

OPTIMIZERS: Mapping[str, tuple[str, str]] = {
    "adamw_torch": ("adamw", "foreach"),
    "adamw_torch_fused": ("adamw", "kernel"),
    "adamw_hf": ("adamw", "foreach"),
    "adamw_torch_8bit": ("adamw-8bit", "none"),
    "ao_adamw_8bit": ("adamw-8bit", "none"),
    "adamw_bnb_8bit": ("adamw-8bit", "none"),
    "adamw_8bit": ("adamw-8bit", "none"),
    "adamw_torch_4bit": ("adamw-4bit", "none"),
    "ao_adamw_4bit": ("adamw-4bit", "none"),
    "ao_adamw_fp8": ("adamw-fp8", "none"),
    "paged_adamw_32bit": ("paged-adamw", "none"),
    "paged_adamw": ("paged-adamw", "none"),
    "paged_adamw_8bit": ("paged-adamw-8bit", "none"),
    "adafactor": ("adafactor-fixed-rate", "none"),
    "sgd": ("sgd", "foreach"),
    "muon": ("muon", "none"),
    "apollo_adamw": ("apollo", "none"),
}
"""{name: optimizer and fusion}. On CUDA, where these trainers run, torch batches by itself."""
_BY_TORCHAO = "adamw-8bit is torchao's, with as many bytes as that of bitsandbytes"
_OF_ANOTHER_KIND = {
    "adamw_bnb_8bit": _BY_TORCHAO,
    "adamw_8bit": _BY_TORCHAO,
    "apollo_adamw": "apollo of trials has rank 256, or a quarter of a matrix' shorter side",
    "muon": "muon of trials scales updates as arXiv:2502.16982 does, so that its rate is another",
}
OTHER_OPTIMIZERS = (
    *("adamw_torch_xla", "adamw_torch_npu_fused", "adamw_anyprecision"),
    *("ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "adagrad"),
    *("lion_8bit", "lion_32bit", "paged_lion_32bit", "paged_lion_8bit", "lomo", "adalomo"),
    *("rmsprop", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "stable_adamw"),
    *("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "galore_adamw_layerwise"),
    *("galore_adamw_8bit_layerwise", "galore_adafactor_layerwise"),
    *("apollo_adamw_layerwise", "grokadamw", "schedule_free_radam", "schedule_free_adamw"),
    "schedule_free_sgd",
    # axolotl's own: axolotl 0.19.0, src/axolotl/utils/schemas/enums.py.
    *("optimi_adamw", "adopt_adamw", "adamc", "came_pytorch", "dion"),
    *("sinkgd", "polora", "flash_adamw", "flash_adam", "flash_sgd", "flash_sgdw", "flash_lion"),
    "q_galore_adamw8bit",
)
"""Optimizers that autotune lacks."""
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "linear": "cosine",
    "warmup_stable_decay": "constant",
}
"""{name of a schedule of the learning rate: ours, of one that stays stable until a decay}."""
ATTENTIONS = {
    "sdpa": "auto",
    "eager": "math",
    "flash_attention_2": "flash",
    "flash_attention_3": "flash",
    "flash": "flash",
    "xformers": "efficient",
}
"""{implementation: kernel behind scaled_dot_product_attention that keeps the same tensors}."""
_SEPARATE_LAYERS = frozenset(("q_proj", "k_proj", "v_proj", "o_proj"))
_ATTENTION_LAYERS = _SEPARATE_LAYERS | frozenset(
    (
        *("qkv_proj", "query_key_value", "c_attn", "out_proj", "Wqkv", "q_a_proj", "q_b_proj"),
        *("kv_a_proj_with_mqa", "kv_b_proj"),
    )
)


def compilation(keys: KeysOfFile, *, is_by_mode: bool = True) -> dict[str, str]:
    """Returns what torch.compile compiles, and its mode.

    With `is_by_mode` a mode or a backend alone turns it on, as TrainingArguments does.
    """
    compiles = keys.flag("torch_compile") or keys["torch_compile"] == "auto"  # of axolotl
    mode = keys.one_of("torch_compile_mode", CHOICES["compile_mode"])
    if is_by_mode:
        backend = keys["torch_compile_backend"]
        compiles = compiles or mode is not None or backend is not None
        if backend not in (None, "inductor"):
            keys.refuse("torch_compile_backend", "trials compile with inductor")
    if not compiles:
        return {"compile": "none"}
    return {"compile": "model", "compile_mode": mode or "default"}


def optimizer(keys: KeysOfFile, key: str, *, has_adapters: bool) -> dict[str, Any]:
    """Returns the choices for the name of an optimizer. Raises InvalidInput for one we lack.

    Beside frozen weights its state is small: there the nearest of ours takes its place.
    """
    name = str(keys[key])
    if name in OPTIMIZERS:
        chosen, fusion = OPTIMIZERS[name]
    elif name in OTHER_OPTIMIZERS and has_adapters:
        chosen, fusion = ("adamw-8bit" if "8bit" in name else "adamw", "none")
        keys.refuse(key, f"trials have {chosen}, whose state is small beside frozen weights")
    else:
        otherwise = f"save a copy of the file with one of {', '.join(OPTIMIZERS)}"
        known = (*OPTIMIZERS, *OTHER_OPTIMIZERS)
        raise keys.cannot_train(
            key,
            "autotune has no such optimizer, and its state decides the memory",
            hint=otherwise if name in known else suggestion(name, known, otherwise=otherwise),
        )
    if name in _OF_ANOTHER_KIND:
        keys.refuse(key, _OF_ANOTHER_KIND[name])
    arguments = str(keys["optim_args"] or "")
    if chosen == "sgd" and "momentum" not in arguments:
        keys.refuse(key, "sgd of trials has a momentum, as large as what is trained")
    elif chosen != "sgd" and arguments:
        keys.refuse("optim_args", "trials make the optimizer with its own settings")
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
    settings["schedule"] = _schedule(keys, schedule_key)
    clipping = keys.number("max_grad_norm")
    if clipping:
        settings["gradient_clipping"] = clipping
    seed = keys.whole_number("seed")
    if seed is not None:
        settings["seed"] = seed
    return settings


def _schedule(keys: KeysOfFile, key: str) -> str:
    """Returns the schedule of trials; also of warmup_stable_decay, which is stable or decays."""
    name = str(keys[key])
    ours = SCHEDULES.get(name, "cosine")
    is_ours = ours == name.removesuffix("_with_warmup").removesuffix("_with_min_lr")
    arguments = keys.content("lr_scheduler_kwargs")
    decay = arguments.get("num_decay_steps") if isinstance(arguments, Mapping) else None
    steps, warmup = keys.content("max_steps"), keys.content("warmup_steps") or 0
    is_stable = name == "warmup_stable_decay" and isinstance(warmup, int)
    if is_stable and isinstance(decay, int) and isinstance(steps, int):
        # One step of the full rate is between warm-up and decay of a cosine.
        ours = "cosine" if 0 < decay >= steps - warmup - 1 else "constant"
        is_ours = ours == "cosine" or decay == 0
    if not is_ours:
        keys.refuse(key, f"trials have {ours}, the nearest of two schedules")
    return ours


def liger(keys: KeysOfFile, key: str = "use_liger_kernel") -> dict[str, str]:
    """Returns the choices for Liger's kernels: all of them, and its loss, unless a table says no.

    Where a model is compiled, or its matrices split, they are left out.
    """
    if not keys.flag(key):
        return {"loss": "full"}
    table = keys.table_of("liger_kernel_config")
    off = [part for part in ("rms_norm", "swiglu", "geglu") if table.get(part) is False]
    form = "full" if table.get("fused_linear_cross_entropy") is False else "chunked"
    if "rms_norm" in off and len(off) > 1:
        return {"loss": form}
    if off:
        keys.refuse("liger_kernel_config", LIGER_IN_PART)
    return {"loss": form, **kernels(keys, key)}


LIGER_IN_PART = "trials have Liger's norms and activations together, or none"


def kernels(keys: KeysOfFile, key: str) -> dict[str, str]:
    """Returns the choice for a key of Liger's norms and activations that is on."""
    if keys.flag("torch_compile"):
        keys.refuse(key, "compiled norms and activations of trials are torch's, and keep as little")
        return {}
    return {"kernels": "liger"}


def batch(keys: KeysOfFile, devices: int, plan: Plan | None) -> dict[str, Any]:
    """Returns the global batch of so many devices, and their number where there are several."""
    replicas = max(1, devices // (1 if plan is None else plan.tensor_parallel))
    micro_batch_size = keys.whole_number("per_device_train_batch_size", least=1) or 1
    accumulation = keys.whole_number("gradient_accumulation_steps", least=1) or 1
    settings = {"global_batch": micro_batch_size * accumulation * replicas}
    return settings | ({"devices_per_trial": devices} if devices > 1 else {})


_FSDP_WORDS = {
    "full_shard": "FULL_SHARD",
    "shard_grad_op": "SHARD_GRAD_OP",
    "no_shard": "NO_SHARD",
    "hybrid_shard": "HYBRID_SHARD",
    "hybrid_shard_zero2": "HYBRID_SHARD_ZERO2",
}


def sharing(keys: KeysOfFile, *, is_on_by_table: bool = False) -> Sharing:
    """Returns what devices share out, by `deepspeed`, by `fsdp`, or by accelerate's own file.

    `is_on_by_table`: whether `fsdp_config` alone turns FSDP on.
    """
    has_groups = "parallelism_config" in keys.table.defaults
    if found := deepspeed_file.sharing(keys, "deepspeed"):
        return found
    words = keys["fsdp"]
    words = words.split() if isinstance(words, str) else words
    if words is True or (not words and is_on_by_table and keys.says("fsdp_config")):
        words = ["full_shard"]
    if words:
        if not isinstance(words, list):
            raise keys.invalid("fsdp", "true, or words such as full_shard auto_wrap")
        strategies = [_FSDP_WORDS[str(word)] for word in words if str(word) in _FSDP_WORDS]
        found = accelerate_file.by_fsdp(
            keys,
            "fsdp_config",
            named="fsdp" if keys.says("fsdp") else "fsdp_config",
            strategy=(strategies or ["FULL_SHARD"])[0],
            offload="offload" in words,
        )
        plan = accelerate_file.in_groups(keys, found.plan) if has_groups else found.plan
        return replace(found, plan=plan)
    if keys.launcher is not None:
        return accelerate_file.sharing(keys.launcher, keys.launcher.file.name)
    return Sharing(plan=accelerate_file.in_groups(keys, None) if has_groups else None)


def added_up(plan: Plan | None, precision: str) -> Plan | None:
    """Returns the plan with the sum of gradients: accelerate's FSDP adds up as it computes."""
    is_fsdp = plan is not None and plan.engine == "torch" and plan.sharding != "ddp"
    if plan is None or not is_fsdp or precision in FULL_PRECISIONS:
        return plan
    return replace(plan, gradient_reduction="bf16")


def checkpointing_key(keys: KeysOfFile) -> str:
    """Returns the key of recomputed blocks that a file has: the new name, or the old one."""
    new_name = "activation_checkpointing"
    return new_name if keys.says(new_name) else "gradient_checkpointing"


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


def quantized_weights(settings: Mapping[str, Any]) -> str | None:
    """Returns the number format of `quantization_config` of `from_pretrained`; None: another."""
    if settings.get("load_in_4bit") is True:
        return "nf4"
    if settings.get("load_in_8bit") is True:
        return "int8"
    kind = str(settings.get("quant_type")).lower()
    return next((name for name in ("int8", "fp8") if name in kind.replace("float8", "fp8")), None)


def _is_in_attention(name: str) -> bool:
    """Returns whether a name such as self_attn.dense says that the layer is in the attention."""
    return name.rpartition(".")[0].rpartition(".")[2] in (
        "self_attn",
        "self_attention",
        "attention",
        "attn",
    )


def _is_pattern(name: str) -> bool:
    return any(character in name for character in r"\*()|[]^$+?")


def _layers_of_pattern(keys: KeysOfFile, key: str, pattern: str) -> str:
    """Returns which layers a regular expression finds, by the names in it."""
    has_others = re.search(r"mlp|ffn|gate|up_proj|down|fc|feed|w[123]", pattern)
    if not re.search("attn|attention", pattern):
        keys.refuse(key, "a pattern: trials put adapters on all linear layers of the blocks")
    elif not has_others:
        return "attention"
    return "all-linear"


def beside_adapters(
    keys: KeysOfFile,
    *,
    dropout: str,
    rslora: str | None = None,
    modules: str | None = None,
    dtype: str = "adapter",
) -> dict[str, Any]:
    """Returns what the keys say of adapters, as settings of the workload.

    They are the share that dropout drops, how adapters are scaled, and the modules that are
    trained whole, in `dtype`.
    """
    share = keys.number(dropout) or 0.0
    if share >= 1.0:
        raise keys.invalid(dropout, "a share from 0 to below 1")
    names = () if modules is None else keys[modules] or ()
    if modules is not None and not isinstance(names, str | list | tuple):
        raise keys.invalid(modules, "a list of names of modules")
    settings: dict[str, Any] = {"adapter_dropout": share}
    if (alpha := keys.whole_number("lora_alpha", least=1)) is not None:
        settings["adapter_alpha"] = alpha
    if rslora is not None and keys.flag(rslora):
        settings["adapter_scaling"] = "rslora"
    if names:
        listed = names.split(",") if isinstance(names, str) else [str(name) for name in names]
        settings["modules_to_save"] = [name.strip() for name in listed if name.strip()]
        settings["modules_to_save_dtype"] = dtype
    return settings


def adapter_start(keys: KeysOfFile, key: str, name: Any) -> dict[str, Any]:
    """Returns the setting for peft's `init_lora_weights`, which the key asks for; often none."""
    if name in (None, True):
        return {}
    if str(name) == "pissa" or str(name).startswith("pissa_niter_"):
        if name != PISSA:
            keys.refuse(key, "PiSSA of trials begins by sixteen iterations")
        return {"adapter_init": "pissa"}
    keys.refuse(key, "adapters of trials begin at random, or by PiSSA")
    return {}


def adapted_experts(keys: KeysOfFile, *, layers: str) -> str:
    """Returns which layers have adapters: `layers`, or `experts` where their weights have them."""
    names = keys["lora_target_parameters"] or []
    if not isinstance(names, str | list):
        raise keys.invalid("lora_target_parameters", "names of weights")
    names = [names] if isinstance(names, str) else [str(name) for name in names]
    others = [name for name in names if "experts." not in name]
    if others:
        keys.refuse("lora_target_parameters", "trials put adapters on weights of experts alone")
    if len(others) == len(names):
        return layers
    if layers != "all-linear" or len(names) - len(others) < _WEIGHTS_OF_EXPERTS:
        keys.refuse(
            "lora_target_parameters",
            "trials put adapters on all linear layers of the blocks and on every weight of experts",
        )
    return "experts"


_WEIGHTS_OF_EXPERTS = 2
"""Into the experts, of which transformers makes one matrix, and out of them."""


def adapter_layers(keys: KeysOfFile, key: str, names: Any) -> str:
    """Returns which layers have adapters, for the names of layers or a pattern."""
    if not names or not isinstance(names, str | list):
        raise keys.invalid(key, "names of layers, or all-linear")
    if names in ("all-linear", "all", ["all-linear"], ["all"]):
        return "all-linear"
    if isinstance(names, str):
        names = [names] if _is_pattern(names) else [name.strip() for name in names.split(",")]
    if len(names) == 1 and _is_pattern(str(names[0])):
        return _layers_of_pattern(keys, key, str(names[0]))
    layers = {str(name).rpartition(".")[2] for name in names if not _is_in_attention(str(name))}
    if layers <= _ATTENTION_LAYERS:
        if layers and not (layers >= _SEPARATE_LAYERS or layers.isdisjoint(_SEPARATE_LAYERS)):
            keys.refuse(key, "trials put adapters on all layers of the attention")
        return "attention"
    if "lm_head" in layers or "embed_tokens" in layers:
        keys.refuse(key, "trials put adapters on the linear layers of the blocks alone")
    return "all-linear"
