"""Writes key tables of exports that no test can load with the trainer: `python make.py TARGET`.

Run it with the Python of an environment that has the trainer; it needs nothing of autotune. A table
has, for every key that an export may write, the types and the values it can have, and its default,
as the package itself says: `{"package": "torchtitan 0.3.0", "keys": {"training.max_norm": {"types":
["float", "int"], "default": 1.0}, ...}}`.

    pip install torchtitan==0.3.0 triton     python make.py torchtitan_0_3
    pip install torchtitan==0.2.2 triton     python make.py torchtitan_0_2
    pip install axolotl==0.19.0              python make.py axolotl

forgather is no package: its table was written by hand, from its reference of arguments.
"""

import dataclasses
import enum
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
    "sequence_len", "sample_packing", "eval_sample_packing", "multipack_real_batches",
    "pad_to_sequence_len", "micro_batch_size", "gradient_accumulation_steps", "max_steps", "seed",
    "optimizer", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
    "lr_scheduler", "lr_scheduler_kwargs", "cosine_min_lr_ratio", "warmup_steps", "max_grad_norm",
    "bf16", "fp16", "tf32", "fp8", "fp8_config", "gradient_checkpointing",
    "gradient_checkpointing_kwargs", "selective_checkpointing", "torch_compile",
    "torch_compile_backend", "adapter", "lora_r", "lora_alpha", "lora_dropout",
    "lora_target_linear", "lora_target_modules", "peft_use_dora", "peft_autocast_adapter_dtype",
    "load_in_4bit", "load_in_8bit", "bnb_config_kwargs", "lora_mlp_kernel", "lora_qkv_kernel",
    "lora_o_kernel", "lora_embedding_kernel", "fsdp_version", "fsdp_config", "deepspeed",
    "tensor_parallel_size", "dp_shard_size", "dp_replicate_size",
]
# fmt: on
FSDP = [
    *("reshard_after_forward", "offload_params", "auto_wrap_policy"),
    *("cpu_ram_efficient_loading", "state_dict_type"),
]
DATASET = [
    *("path", "name", "split", "ds_type", "type", "field"),
    *("chat_template", "field_messages", "message_property_mappings"),
    *("roles_to_train", "train_on_eos"),
]


def axolotl():
    from axolotl.utils.schemas.config import AxolotlInputConfig
    from axolotl.utils.schemas.datasets import SFTDataset
    from axolotl.utils.schemas.enums import CANONICAL_ATTN_IMPLS, CustomSupportedOptimizers
    from axolotl.utils.schemas.fp8 import FP8Config
    from axolotl.utils.schemas.fsdp import FSDPConfig
    from axolotl.utils.schemas.training import SelectiveCheckpointingConfig
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    keys = of_pydantic(AxolotlInputConfig, AXOLOTL)
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
    }[target]()
    (HERE / f"{target}.json").write_text(json.dumps(table, indent=1) + "\n")
    print(f"{target}: {len(table['keys'])} keys of {table['package']}")
