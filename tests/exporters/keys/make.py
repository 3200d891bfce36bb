"""Writes key tables of exports that no test can load with the trainer: `python make.py TARGET`.

Run it with the Python of an environment that has the trainer; it needs nothing of autotune. A table
has, for every key that an export may write, the types and the values it can have, and its default,
as the package itself says: `{"package": "torchtitan 0.3.0", "keys": {"training.max_norm": {"types":
["float", "int"], "default": 1.0}, ...}}`.

    pip install torchtitan==0.3.0 triton     python make.py torchtitan_0_3
    pip install torchtitan==0.2.2 triton     python make.py torchtitan_0_2
    pip install axolotl==0.19.0              python make.py axolotl
    pip install llamafactory==0.9.5          python make.py llamafactory
    pip install ms-swift==4.6.0              python make.py ms_swift
    pip install --no-deps unsloth==2026.10.9 python make.py unsloth

forgather is no package: its table was written by hand, from its reference of arguments.
"""

import ast
import dataclasses
import enum
import importlib.util
import inspect
import json
import math
import sys
import types
import typing
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent


def entry(annotation, default):
    found = {"types": [], "values": []}
    collect(annotation, found)
    found["types"] = sorted(set(found["types"]))
    if found["values"]:
        found["values"] += [*([True, False] if "bool" in found["types"] else [])]
        found["values"] += [*([None] if "NoneType" in found["types"] else [])]
    else:
        del found["values"]
    return {**found, "default": plain(default)}


def collect(annotation, found):
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            collect(part, found)
    elif origin is typing.Literal:
        found["types"] += [type(value).__name__ for value in typing.get_args(annotation)]
        found["values"] += typing.get_args(annotation)
    elif origin is typing.Annotated:
        collect(typing.get_args(annotation)[0], found)
    elif annotation is typing.Any:
        found["types"].append("Any")
    elif isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        found["types"].append("str")
    elif dataclasses.is_dataclass(annotation) or hasattr(annotation, "model_fields"):
        found["types"].append("dict")
    else:
        found["types"].append((origin or annotation).__name__)


def plain(value):
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return (
        value if isinstance(value, str | int | float | bool | list | dict | None) else repr(value)
    )


def of_dataclass(value, prefix="", only=None):
    keys = {}
    hints = typing.get_type_hints(type(value), include_extras=True)
    for field in dataclasses.fields(value):
        name, current = f"{prefix}{field.name}", getattr(value, field.name)
        if only is not None and not any(name == one or one.startswith(f"{name}.") for one in only):
            continue
        if dataclasses.is_dataclass(current):
            keys.update(of_dataclass(current, f"{name}.", only))
        else:
            keys[name] = entry(hints[field.name], current)
    return keys


TITAN = [
    *(
        f"training.{name}"
        for name in ("local_batch_size", "global_batch_size", "seq_len", "steps", "max_norm")
    ),
    *(f"training.{name}" for name in ("dtype", "mixed_precision_param")),
    *(
        f"lr_scheduler.{name}"
        for name in ("warmup_steps", "total_steps", "decay_ratio", "decay_type", "min_lr_factor")
    ),
    "compile.enable",
    "compile.components",
    "optimizer.implementation",
    "debug.seed",
    *(f"parallelism.data_parallel_{name}_degree" for name in ("replicate", "shard")),
    "parallelism.fsdp_reshard_after_forward",
    "parallelism.tensor_parallel_degree",
    "training.enable_cpu_offload",
]


def torchtitan_0_3():
    from torchtitan.components.lora import LoRAConverter
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.components.quantization.float8 import Float8LinearConverter
    from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
    from torchtitan.models.common.config_utils import decoder_vocab_size
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    start = llama3_debugmodel()
    configs = (
        ChunkedLossWrapper,
        CrossEntropyLoss,
        Float8LinearConverter,
        FullAC,
        LoRAConverter,
        MemoryBudgetAC,
        SelectiveAC,
    )
    calls = {f"{one.__name__}.Config": of_config(one.Config) for one in configs}
    adamw = dict(start.optimizer.param_groups[0].optimizer_kwargs)
    calls["default_adamw"] = {name: entry(type(value), value) for name, value in adamw.items()}
    calls["model_registry"] = {
        name: entry(str if name == "attn_backend" else typing.Any, parameter.default)
        for name, parameter in inspect.signature(model_registry).parameters.items()
        if name in ("attn_backend", "converters")
    }
    calls["decoder_vocab_size"] = {}
    assert callable(default_adamw)
    assert callable(decoder_vocab_size)
    whole = {
        "activation_checkpoint": [
            *("FullAC.Config", "MemoryBudgetAC.Config", "SelectiveAC.Config"),
            None,
        ],
        "loss": ["ChunkedLossWrapper.Config", "CrossEntropyLoss.Config"],
        "optimizer": ["default_adamw"],
        "model_spec": ["model_registry"],
    }
    assert set(whole) <= {field.name for field in dataclasses.fields(start)}
    keys = of_dataclass(start, only=[*TITAN, "training.disable_cuda_graphs"])
    return {
        "package": f"torchtitan {version('torchtitan')}",
        "keys": keys,
        "calls": calls,
        "objects": whole,
    }


def of_config(config):
    hints = typing.get_type_hints(config)
    made = config()
    return {
        field.name: entry(hints[field.name], getattr(made, field.name))
        for field in dataclasses.fields(config)
    }


def torchtitan_0_2():
    from torchtitan.config import JobConfig
    from torchtitan.models.attention import ScaledDotProductAttentionWrapper

    assert ScaledDotProductAttentionWrapper.sdpa_backends == []
    wanted = [
        *TITAN,
        *(f"model.{name}" for name in ("name", "flavor", "converters")),
        *(f"optimizer.{name}" for name in ("name", "lr", "beta1", "beta2", "eps", "weight_decay")),
        "optimizer.early_step_in_backward",
        *(
            f"activation_checkpoint.{name}"
            for name in ("mode", "selective_ac_option", "memory_budget")
        ),
        "experimental.custom_import",
        "quantize.linear.float8.filter_fqns",
        "quantize.linear.float8.recipe_name",
    ]
    keys = of_dataclass(JobConfig(), only=wanted)
    # Values that its types do not say: `build_optimizers`, `_apply_ac_to_transformer_block`.
    keys["optimizer.name"]["values"] = ["Adam", "AdamW"]
    keys["activation_checkpoint.selective_ac_option"]["values"] = ["op", "2", "4"]
    assert set(wanted) == set(keys), set(wanted) ^ set(keys)
    return {"package": f"torchtitan {version('torchtitan')}", "keys": keys}


# fmt: off
AXOLOTL = [
    "base_model", "reinit_weights", "attn_implementation", "datasets", "val_set_size",
    "sequence_len", "sample_packing", "train_on_inputs", "eval_sample_packing",
    "multipack_real_batches",
    "pad_to_sequence_len", "micro_batch_size", "gradient_accumulation_steps", "max_steps", "seed",
    "optimizer", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
    "lr_scheduler", "lr_scheduler_kwargs", "cosine_min_lr_ratio", "warmup_steps", "max_grad_norm",
    "bf16", "fp16", "tf32", "fp8", "fp8_config", "gradient_checkpointing",
    "gradient_checkpointing_kwargs", "selective_checkpointing", "torch_compile",
    "torch_compile_backend", "adapter", "lora_r", "lora_alpha", "lora_dropout",
    "lora_target_parameters", "quantize_moe_experts",
    "lora_target_linear", "lora_target_modules", "lora_modules_to_save", "peft_use_dora",
    "tiled_mlp", "torch_compile_mode", "layer_offloading",
    "peft_use_rslora", "peft_init_lora_weights", "lora_rank_pattern", "lora_alpha_pattern",
    "peft_autocast_adapter_dtype",
    "load_in_4bit", "load_in_8bit", "bnb_config_kwargs", "lora_mlp_kernel", "lora_qkv_kernel",
    "lora_o_kernel", "lora_embedding_kernel", "fsdp_version", "fsdp_config", "deepspeed",
    "tensor_parallel_size", "dp_shard_size", "dp_replicate_size", "plugins",
]
LIGER = [
    "liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_fused_linear_cross_entropy",
]
# fmt: on
FSDP = [
    *("reshard_after_forward", "offload_params", "auto_wrap_policy"),
    *("cpu_ram_efficient_loading", "state_dict_type"),
]
DATASET = [
    *("path", "name", "split", "ds_type", "type", "field"),
    *("chat_template", "field_messages", "message_property_mappings"),
    *("roles", "roles_to_train", "train_on_eos"),
]


def axolotl():
    from axolotl.integrations.liger.args import LigerArgs
    from axolotl.utils.schemas.config import AxolotlInputConfig
    from axolotl.utils.schemas.datasets import SFTDataset
    from axolotl.utils.schemas.enums import CANONICAL_ATTN_IMPLS, CustomSupportedOptimizers
    from axolotl.utils.schemas.fp8 import FP8Config
    from axolotl.utils.schemas.fsdp import FSDPConfig
    from axolotl.utils.schemas.training import SelectiveCheckpointingConfig
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    keys = of_pydantic(AxolotlInputConfig, AXOLOTL) | of_pydantic(LigerArgs, LIGER)
    keys["optimizer"]["values"] = sorted(
        {one.value for one in (*OptimizerNames, *CustomSupportedOptimizers)}
    )
    keys["lr_scheduler"]["values"] = sorted(one.value for one in SchedulerType)
    keys["attn_implementation"]["values"] = sorted(CANONICAL_ATTN_IMPLS)
    inner = {
        "datasets": of_pydantic(SFTDataset, DATASET),
        "fp8_config": of_pydantic(FP8Config, ["recipe"]),
        "fsdp_config": of_pydantic(FSDPConfig, FSDP),
        "selective_checkpointing": of_pydantic(
            SelectiveCheckpointingConfig, ["save", "save_sliding_window"]
        ),
        # transformers' own: `GradientCheckpointingLayer`,
        # `PreTrainedModel.gradient_checkpointing_enable`.
        "gradient_checkpointing_kwargs": {
            "use_reentrant": {"types": ["bool"], "default": None},
            "every_n_layers": {"types": ["int"], "default": None},
        },
        # transformers' own: `get_wsd_schedule`, `get_cosine_with_min_lr_schedule_with_warmup`.
        "lr_scheduler_kwargs": {
            "num_decay_steps": {"types": ["int"], "default": None},
            "min_lr_ratio": {"types": ["float"], "default": 0.0},
            "min_lr_rate": {"types": ["float"], "default": None},
        },
    }
    package = f"axolotl {version('axolotl')}, transformers {version('transformers')}"
    return {"package": package, "keys": keys, "inner": inner}


# fmt: off
LLAMAFACTORY = [
    "model_name_or_path", "train_from_scratch", "flash_attn", "quantization_method",
    "quantization_bit", "quantization_type", "double_quantization", "upcast_layernorm",
    "upcast_lmhead_output", "disable_gradient_checkpointing", "use_reentrant_gc", "use_unsloth",
    "use_unsloth_gc", "enable_liger_kernel", "shift_attn", "dataset", "dataset_dir", "template",
    "cutoff_len", "train_on_prompt", "mask_history", "packing", "neat_packing", "streaming",
    "val_size", "stage", "finetuning_type", "pure_bf16", "lora_rank", "lora_alpha", "lora_dropout",
    "lora_target", "use_rslora", "use_dora", "pissa_init", "pissa_iter", "additional_target",
    "loraplus_lr_ratio", "use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon",
    "use_llama_pro", "fp8", "output_dir", "do_train", "max_steps", "per_device_train_batch_size",
    "gradient_accumulation_steps", "learning_rate", "weight_decay", "max_grad_norm", "optim",
    "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "lr_scheduler_type",
    "lr_scheduler_kwargs", "warmup_steps", "bf16", "fp16", "tf32", "use_cpu", "torch_compile",
    "torch_compile_backend", "torch_compile_mode", "gradient_checkpointing",
    "gradient_checkpointing_kwargs", "seed", "data_seed", "deepspeed", "fsdp",
]
# fmt: on


def llamafactory():
    """Of hiyouga/LLaMA-Factory, tag v0.9.5 (commit 7af9095), `src/llamafactory/hparams/`."""
    from llamafactory.data.parser import DatasetAttr
    from llamafactory.hparams.parser import _TRAIN_ARGS

    keys = {}
    for arguments in _TRAIN_ARGS:
        keys |= of_arguments(arguments, LLAMAFACTORY)
    assert set(LLAMAFACTORY) == set(keys), set(LLAMAFACTORY) ^ set(keys)
    inner = {
        "dataset_info": sorted(
            {field.name for field in dataclasses.fields(DatasetAttr)}
            | {"file_name", "hf_hub_url", "columns", "tags"}
        )
    }
    return {"package": packages("llamafactory", "transformers"), "keys": keys, "inner": inner}


# fmt: off
MS_SWIFT = [
    "model", "use_hf", "torch_dtype", "attn_impl", "task_type", "tuner_type", "tuner_backend",
    "use_swift_lora", "lora_rank", "lora_alpha", "lora_dropout", "lora_dtype", "lora_bias",
    "lorap_lr_ratio", "use_rslora", "use_dora", "init_weights", "target_modules", "target_regex",
    "modules_to_save", "quant_method", "quant_bits", "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_type", "bnb_4bit_quant_storage", "bnb_4bit_use_double_quant", "dataset",
    "columns",
    "disable_auto_column_mapping", "custom_dataset_info", "max_length", "truncation_strategy",
    "packing", "padding_free", "loss_scale", "template", "use_chat_template", "streaming",
    "external_plugins",
    "freeze_parameters_ratio", "sequence_parallel_size", "use_liger_kernel", "use_logits_to_keep",
    "optimizer", "loss_type", "enable_dft_loss", "use_galore", "lisa_activated_layers",
    "output_dir", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
    "learning_rate", "weight_decay", "max_grad_norm", "optim", "optim_args", "adam_beta1",
    "adam_beta2", "adam_epsilon", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps",
    "bf16", "fp16", "tf32", "use_cpu", "torch_compile", "torch_compile_backend",
    "torch_compile_mode", "gradient_checkpointing", "gradient_checkpointing_kwargs", "seed",
    "data_seed", "deepspeed", "fsdp",
]
# fmt: on


def ms_swift():
    """Of modelscope/ms-swift, the package 4.6.0, `swift/arguments/` and `swift/trainers/`."""
    from swift.arguments import PretrainArguments, SftArguments
    from swift.dataset.dataset_meta import DatasetMeta

    keys = of_arguments(SftArguments, MS_SWIFT)
    assert set(MS_SWIFT) == set(keys), set(MS_SWIFT) ^ set(keys)
    pretraining = of_arguments(PretrainArguments, MS_SWIFT)
    inner = {
        "dataset_info": sorted(field.name for field in dataclasses.fields(DatasetMeta)),
        "pt": {name: one["default"] for name, one in pretraining.items() if one != keys[name]},
    }
    return {"package": packages("ms-swift", "transformers"), "keys": keys, "inner": inner}


def of_arguments(arguments, names):
    """Returns the keys of a dataclass of arguments, which cannot be made without some of them."""
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    hints, keys = typing.get_type_hints(arguments), {}
    for field in dataclasses.fields(arguments):
        if field.name not in names or not field.init:
            continue
        default = field.default
        if default is dataclasses.MISSING:
            default = (
                None if field.default_factory is dataclasses.MISSING else field.default_factory()
            )
        keys[field.name] = entry(hints[field.name], getattr(default, "value", default))
        if "float" in keys[field.name]["types"]:
            keys[field.name]["types"].append("int")
    named = {"optim": OptimizerNames, "lr_scheduler_type": SchedulerType}
    named |= {name: hints[name] for name in ("flash_attn", "quantization_method") if name in hints}
    for name in named.keys() & keys.keys():
        keys[name]["values"] = sorted(one.value for one in named[name])
    return keys


def unsloth():
    """Of unslothai/unsloth, the package 2026.10.9, which is read and not imported: it needs a GPU.

    `use_dora` is one of the further arguments that `get_peft_model` hands to peft.
    """
    folder = Path(importlib.util.find_spec("unsloth").origin).parent / "models"
    peft = signature(folder / "llama.py", "FastLlamaModel", "get_peft_model")
    calls = {
        "from_pretrained": signature(folder / "loader.py", "FastLanguageModel", "from_pretrained"),
        "get_peft_model": {**peft, "use_dora": False},
    }
    return {"package": packages("unsloth"), "keys": {}, "calls": calls}


def signature(file, name, method):
    """Returns {argument: default} of a method, without running its file; None for no literal."""
    classes = {one.name: one for one in ast.parse(file.read_text()).body if hasattr(one, "name")}
    [found] = [one for one in classes[name].body if getattr(one, "name", None) == method]
    names = [one.arg for one in found.args.args]
    values = [literal(one) for one in found.args.defaults]
    without = dict.fromkeys(names[: len(names) - len(values)])
    return {**without, **dict(zip(names[len(without) :], values, strict=True))}


def literal(expression):
    try:
        return ast.literal_eval(expression)
    except ValueError:
        return None


def packages(*names):
    return ", ".join(f"{name} {version(name)}" for name in names)


def of_pydantic(model, names):
    return {
        name: entry(model.model_fields[name].annotation, default_of(model.model_fields[name]))
        for name in names
    }


def default_of(field):
    return None if field.is_required() or field.default_factory is not None else field.default


if __name__ == "__main__":
    target = sys.argv[1]
    table = {
        "torchtitan_0_3": torchtitan_0_3,
        "torchtitan_0_2": torchtitan_0_2,
        "axolotl": axolotl,
        "llamafactory": llamafactory,
        "ms_swift": ms_swift,
        "unsloth": unsloth,
    }[target]()
    (HERE / f"{target}.json").write_text(json.dumps(table, indent=1) + "\n")
    print(f"{target}: {len(table['keys'])} keys of {table['package']}")
