"""TRL: the YAML file of `trl sft --config`.

Three of its defaults decide memory: weights in float32 unless `dtype` says otherwise, checkpointing
on, and autocast to bfloat16 on. Its loss is made in chunks, whatever the file says.
"""

from typing import Any

from autotune.importers import transformers_keys
from autotune.importers.finished import finished
from autotune.importers.imported import ImportedTraining, Trainer
from autotune.importers.key_table import load_table
from autotune.importers.keys_of_file import KeysOfFile


def read(keys: KeysOfFile) -> ImportedTraining:
    """Returns the training. Raises InvalidInput."""
    adapter = _adapter(keys)
    optimizer = transformers_keys.optimizer(keys, "optim")
    micro_batch_size = keys.whole_number("per_device_train_batch_size", least=1) or 1
    accumulation = keys.whole_number("gradient_accumulation_steps", least=1) or 1
    model = keys.text("model_name_or_path")
    config: dict[str, Any] = {
        "precision": _precision(keys, has_adapters=bool(adapter)),
        "checkpointing": _checkpointing(keys),
        "compile": "model" if keys.flag("torch_compile") else "none",
        **optimizer,
        "micro_batch_size": micro_batch_size,
        "attention": _attention(keys),
        "loss": "chunked",
        "activation_offload": "cpu" if keys.flag("activation_offloading") else "none",
        **adapter,
    }
    workload: dict[str, Any] = {
        "global_batch": micro_batch_size * accumulation,
        "sequence_length": keys.whole_number("max_length", least=1),
        "packing": "packed" if keys.flag("packing") else "padded",
        "streaming": keys.flag("dataset_streaming"),
        **transformers_keys.learning(
            keys,
            optimizer=optimizer["optimizer"],
            adapter=config.get("adapter", "none"),
            schedule_key="lr_scheduler_type",
        ),
    }
    if model is not None:
        workload |= {"model": model, "pretrained": True, "tokenizer": "model"}
    if dataset := keys.text("dataset_name"):
        workload |= {
            "dataset": dataset,
            "dataset_config": keys.text("dataset_config"),
            "dataset_split": keys.text("dataset_train_split"),
        }
    return finished(keys, workload=workload, config=config)


def _dtype(keys: KeysOfFile) -> str:
    """Returns the number format of the weights."""
    dtype = str(keys.table_of("model_init_kwargs").get("dtype") or keys["dtype"])
    if dtype == "auto":
        keys.refuse("dtype", "that of the checkpoint, taken to be bfloat16 as it is of most models")
        return "bfloat16"
    return dtype.removeprefix("torch.")


def _precision(keys: KeysOfFile, *, has_adapters: bool) -> str:
    # TRL turns bf16 on unless the file turns fp16 on.
    is_bf16 = keys.flag("bf16") if keys.says("bf16") else not keys.flag("fp16")
    dtype = _dtype(keys)
    if keys.flag("fp16"):
        return "fp16-mixed"
    if has_adapters:
        return "bf16-mixed" if is_bf16 else "fp32"
    if dtype == "bfloat16":
        return "bf16-true"
    if is_bf16:
        return "bf16-mixed"
    return "tf32" if keys.flag("tf32") else "fp32"


def _checkpointing(keys: KeysOfFile) -> str:
    key = "activation_checkpointing"
    if not keys.says(key):
        key = "gradient_checkpointing"
    arguments = f"{key}_kwargs"
    if keys.table_of(arguments).get("selective") and keys.flag(key):
        keys.refuse(arguments, "trials keep the outputs of matrix products, too")
        return "selective"
    return transformers_keys.checkpointing(keys, key, of_arguments=arguments)


def _attention(keys: KeysOfFile) -> str:
    of_model = keys.table_of("model_init_kwargs").get("attn_implementation")
    name = of_model or keys.text("attn_implementation")
    if name is None:
        return "auto"
    return transformers_keys.attention(keys, "attn_implementation", str(name))


def _adapter(keys: KeysOfFile) -> dict[str, Any]:
    if not keys.flag("use_peft"):
        return {}
    base_weights = "bf16" if _dtype(keys) == "bfloat16" else "trained"
    if keys.flag("load_in_8bit"):
        base_weights = "int8"
    if keys.flag("load_in_4bit"):
        base_weights = "nf4"
    targets = keys["lora_target_modules"]
    layers = "attention"  # peft's own choice for a Llama: the queries and values
    if targets is None:
        keys.refuse("lora_target_modules", "trials put adapters on all layers of the attention")
    else:
        layers = transformers_keys.adapter_layers(keys, "lora_target_modules", targets)
    return {
        "adapter": "dora" if keys.flag("use_dora") else "lora",
        "adapter_rank": keys.whole_number("lora_r", least=1),
        "adapter_targets": layers,
        "base_weights": base_weights,
    }


TRAINER = Trainer(
    table=load_table("trl"),
    signs=frozenset(("model_name_or_path", "per_device_train_batch_size", "dataset_name")),
    read=read,
)
