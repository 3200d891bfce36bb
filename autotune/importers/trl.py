"""TRL: the YAML file of `trl sft --config`.

Three of its defaults decide memory: weights in float32 unless `dtype` says otherwise, checkpointing
on, and autocast to bfloat16 on. Its loss is made in chunks, whatever the file says.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.errors import suggestion
from autotune.importers import transformers_keys
from autotune.importers.accelerate_file import ACCELERATE
from autotune.importers.beside import keys_beside, missing_file
from autotune.importers.data_files import named_by
from autotune.importers.finished import devices_of, finished
from autotune.importers.imported import ImportedTraining, Trainer
from autotune.importers.key_table import load_table
from autotune.importers.keys_of_file import KeysOfFile


def read(keys: KeysOfFile) -> ImportedTraining:
    """Returns the training. Raises InvalidInput."""
    _read_launcher(keys)
    shared = transformers_keys.sharing(keys)
    adapter = _adapter(keys)
    optimizer = transformers_keys.optimizer(keys, "optim", has_adapters=bool(adapter))
    micro_batch_size = keys.whole_number("per_device_train_batch_size", least=1) or 1
    model = keys.text("model_name_or_path")
    config: dict[str, Any] = {
        "precision": _precision(keys, shared.precision, has_adapters=bool(adapter)),
        "checkpointing": "block" if shared.checkpoints else _checkpointing(keys),
        **transformers_keys.compilation(keys),
        **optimizer,
        "micro_batch_size": micro_batch_size,
        "attention": _attention(keys),
        # It is made in chunks, with Liger's kernels or without.
        **(transformers_keys.liger(keys) | {"loss": "chunked"}),
        "activation_offload": "cpu" if keys.flag("activation_offloading") else "none",
        **adapter,
    }
    workload: dict[str, Any] = {
        **transformers_keys.batch(keys, devices_of(keys), shared.plan),
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
    workload |= _dataset(keys)
    if adapter:
        workload |= transformers_keys.beside_adapters(
            keys,
            dropout="lora_dropout",
            rslora="use_rslora",
            modules="lora_modules_to_save",
            dtype="base",
        )
    plan = transformers_keys.added_up(shared.plan, config["precision"])
    return finished(keys, workload=workload, config=config, plan=plan)


_LAUNCHERS: Mapping[str, Mapping[str, Any]] = {
    "single_gpu": {"distributed_type": "NO", "num_processes": 1},
    "multi_gpu": {"distributed_type": "MULTI_GPU"},
    "fsdp1": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}},
    "fsdp2": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}},
    "zero1": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 1}},
    "zero2": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}},
    "zero3": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}},
}
"""What the files that TRL brings say. Source: trl/accelerate_configs of TRL 1.16.0."""
_OF_ALL_LAUNCHERS = {"num_processes": 8, "mixed_precision": "bf16"}


def _read_launcher(keys: KeysOfFile) -> None:
    """Read the file of accelerate that the training is started with, if the file names one."""
    name = keys.text("accelerate_config")
    if name is None or keys.launcher is not None:
        return
    if name in _LAUNCHERS:
        content = {**_OF_ALL_LAUNCHERS, **_LAUNCHERS[name]}
        keys.launched_by(KeysOfFile(content, ACCELERATE, file=Path(name)))
        return
    launcher = keys_beside(keys, "accelerate_config", ACCELERATE)
    if launcher is None:
        hint = suggestion(name, _LAUNCHERS, otherwise=f"put it beside {keys.file.name}")
        raise missing_file(keys, "accelerate_config", name, hint=hint)
    keys.launched_by(launcher)


def _dataset(keys: KeysOfFile) -> dict[str, Any]:
    """Returns the dataset, of a mixture the first one.

    Its columns say what it is: text, messages, or a prompt and its completion.
    """
    if keys.says("completion_only_loss") and not keys.flag("completion_only_loss"):
        keys.refuse(
            "completion_only_loss",
            "where rows have prompt and completion, trials learn the completion alone unless "
            "--prompt-format says otherwise",
        )
    split = keys.text("dataset_train_split")
    if name := keys.text("dataset_name") or keys.text("dataset_id_or_path"):
        return {
            "dataset": name,
            "dataset_config": keys.text("dataset_config"),
            "dataset_split": split,
        }
    mixture = keys.table_of("dataset_mixer")
    if mixture:
        if len(mixture) > 1:
            keys.refuse("dataset_mixer", "trials read the first of several datasets")
        return {"dataset": str(next(iter(mixture)))}
    key = "datasets" if keys.says("datasets") else "dataset_mixture"
    entries = keys.list_of(key) if key == "datasets" else keys.table_of(key).get("datasets")
    if not entries:
        return {}
    first = entries[0] if isinstance(entries, list) else None
    name = named_by(first) if isinstance(first, Mapping) else None
    if not isinstance(name, str):
        raise keys.invalid(key, "a list of datasets, each with its id or path")
    if len(entries) > 1:
        keys.refuse(key, "trials read the first of several datasets")
    assert isinstance(first, Mapping)
    return {
        "dataset": name,
        "dataset_config": first.get("config", first.get("name")),
        "dataset_split": first.get("split", split),
    }


def _dtype(keys: KeysOfFile) -> str:
    """Returns the number format of the weights."""
    of_model = keys.table_of("model_init_kwargs")
    dtype = str(of_model.get("dtype") or of_model.get("torch_dtype") or keys["dtype"])
    if dtype == "auto":
        keys.refuse("dtype", "that of the checkpoint, taken to be bfloat16 as it is of most models")
        return "bfloat16"
    return dtype.removeprefix("torch.")


def _precision(keys: KeysOfFile, shared: str | None, *, has_adapters: bool) -> str:
    # TRL turns bf16 on unless the file turns fp16 on.
    is_bf16 = keys.flag("bf16") if keys.says("bf16") else not keys.flag("fp16")
    is_bf16 = is_bf16 or shared == "bf16"
    dtype = _dtype(keys)
    if keys.flag("fp16") or shared == "fp16":
        return "fp16-mixed"
    if has_adapters and is_bf16:
        return "bf16-mixed"
    if dtype == "bfloat16":
        return "bf16-true"
    if is_bf16:
        return "bf16-mixed"
    return "tf32" if keys.flag("tf32") else "fp32"


def _checkpointing(keys: KeysOfFile) -> str:
    key = transformers_keys.checkpointing_key(keys)
    arguments = f"{key}_kwargs"
    if keys.table_of(arguments).get("selective") and keys.flag(key):
        if keys.table_of(arguments).get("every_n_layers", 1) != 1:
            keys.refuse(arguments, "trials with save-attention recompute every block")
        return "save-attention"
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
    base_weights = "bf16" if _dtype(keys) in ("bfloat16", "float16") else "trained"
    quantized = keys.table_of("model_init_kwargs").get("quantization_config")
    if isinstance(quantized, Mapping):
        base_weights = transformers_keys.quantized_weights(quantized) or base_weights
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
        "adapter_targets": transformers_keys.adapted_experts(keys, layers=layers),
        "base_weights": base_weights,
    }


TRAINER = Trainer(
    table=load_table("trl"),
    signs=frozenset(("model_name_or_path", "per_device_train_batch_size", "dataset_name")),
    read=read,
)
