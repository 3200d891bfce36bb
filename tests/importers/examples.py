"""A few files of each trainer, small and of our own, which together ask for what it reads."""

import json
from typing import Any

import yaml

from autotune.importers.registry import TRAINERS

MODEL = "Qwen/Qwen3-8B"
SMALLEST: dict[str, dict[str, Any]] = {
    "axolotl": {"base_model": MODEL, "micro_batch_size": 2},
    "trl": {
        "model_name_or_path": MODEL,
        "dataset_name": "owner/name",
        "dataset_num_proc": 2,
        "per_device_train_batch_size": 2,
    },
    "llamafactory": {
        "model_name_or_path": MODEL,
        "stage": "sft",
        "finetuning_type": "full",
        "per_device_train_batch_size": 2,
    },
    "transformers": {
        "model_name_or_path": MODEL,
        "output_dir": "output",
        "block_size": 1024,
        "per_device_train_batch_size": 2,
    },
    "torchtitan": {"model": {"name": "llama3", "flavor": "8B"}, "training": {"seq_len": 1024}},
    "lightning": {
        "seed_everything": 1,
        "trainer": {"precision": "bf16-mixed"},
        "data": {"class_path": "my.Data", "init_args": {"batch_size": 2, "max_length": 512}},
    },
}
"""{trainer: the keys of a file that it could train}, for `OPTIONS` beside it."""
OPTIONS = {"lightning": {"model": MODEL}}

_LORA = {"adapter": "lora", "lora_target_modules": ["q_proj", "v_proj"]}
_MORE: dict[str, list[dict[str, Any]]] = {
    "axolotl": [
        _LORA,
        {"adapter": "qlora", "load_in_4bit": True, "lora_target_linear": True},
        {"fsdp": ["full_shard"], "fsdp_config": {"offload_params": True}, "batch_size": 4},
        {"pretraining_dataset": "owner/name", "deepspeed": "zero3.json", "bf16": False},
        {"gradient_checkpointing": True, "fp16": True, "optimizer": "adamw_torch"},
    ],
    "trl": [
        {"use_peft": True, "load_in_4bit": True, "lora_target_modules": "all-linear"},
        {"dataset_name": None, "dataset_mixture": {"datasets": [{"id": "owner/name"}]}},
        {"dataset_name": None, "dataset_mixer": {"owner/name": 1.0}, "fp16": True},
        {"dataset_name": None, "datasets": [{"path": "owner/name"}], "bf16": False, "tf32": True},
        {"accelerate_config": "zero3", "fsdp": "full_shard"},
        {"activation_checkpointing": True, "dtype": "bfloat16", "bf16": False},
        {"use_liger_kernel": True},
    ],
    "llamafactory": [
        {"finetuning_type": "lora", "lora_rank": 16, "bf16": True},
        {"finetuning_type": "lora", "quantization_bit": 4, "lora_target": "q_proj,v_proj"},
        {"pure_bf16": True, "deepspeed": "ds_z3_config.json", "packing": True},
        {"fsdp": "full_shard auto_wrap", "tf32": True, "dataset": "owner/name"},
        {"enable_liger_kernel": True, "use_liger_kernel": True},
    ],
    "transformers": [
        {"train_mode": "qlora", "template_name": "llama3", "bf16": True, "tf32": False},
        {"fsdp": "full_shard", "fsdp_config": {"activation_checkpointing": True}},
        {"train_file": "text.txt", "config_name": MODEL, "model_name_or_path": None},
        {"deepspeed": {"zero_optimization": {"stage": 2}}, "tf32": True},
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {}},
        {"use_liger_kernel": True},
        {"dataset_name": "owner/name", "dataset_config_name": "en", "gradient_checkpointing": True},
    ],
    "torchtitan": [
        {"activation_checkpoint": {"mode": "memory_budget"}, "compile": {"enable": True}},
        {"parallelism": {"data_parallel_shard_degree": 4, "tensor_parallel_degree": 2}},
        {"optimizer": {"fused": True}, "hf_transformers": {"model": MODEL}},
    ],
    "lightning": [
        {"optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-4}}},
        {"model": {"class_path": "my.Model"}, "trainer": {"strategy": "fsdp", "devices": 4}},
        {"trainer": {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}},
    ],
}


def contents(trainer):
    """Returns the content of each file: the smallest, and that with more keys."""
    return [SMALLEST[trainer], *({**SMALLEST[trainer], **more} for more in _MORE[trainer])]


def written(trainer, content, folder):
    """Returns the file of a content, in the first language of its trainer."""
    suffix = TRAINERS[trainer].suffixes[0]
    file = folder / f"file{suffix}"
    file.write_text(toml_of(content) if suffix == ".toml" else text_of(content, suffix))
    return file


def text_of(content, suffix):
    return json.dumps(content) if suffix == ".json" else yaml.safe_dump(content)


def toml_of(content, within=""):
    """Returns TOML of tables within tables."""
    values = [
        f"{key} = {json.dumps(value)}\n"
        for key, value in content.items()
        if not isinstance(value, dict) and value is not None
    ]
    tables = [
        toml_of(value, f"{within}{key}.")
        for key, value in content.items()
        if isinstance(value, dict)
    ]
    heading = f"[{within.rstrip('.')}]\n" if within else ""
    return heading + "".join(values) + "".join(tables)
