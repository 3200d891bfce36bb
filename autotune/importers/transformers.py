"""transformers' Trainer: a JSON file of TrainingArguments, with the arguments of a script.

The script's are those of run_clm.py, an example of transformers; the files of Firefly have a few of
their own. A model's weights are loaded in the number format of the checkpoint.
"""

from typing import Any

from autotune.importers import transformers_keys
from autotune.importers.finished import devices_of, finished
from autotune.importers.imported import ImportedTraining, Trainer
from autotune.importers.key_table import load_table
from autotune.importers.keys_of_file import KeysOfFile


def read(keys: KeysOfFile) -> ImportedTraining:
    """Returns the training. Raises InvalidInput."""
    shared = transformers_keys.sharing(keys)
    adapter = _adapter(keys)
    checkpoints = transformers_keys.checkpointing_key(keys)
    optimizer = transformers_keys.optimizer(keys, "optim", has_adapters=bool(adapter))
    model = keys.text("model_name_or_path")
    config: dict[str, Any] = {
        "precision": _precision(keys, bool(adapter), shared.precision),
        "checkpointing": transformers_keys.checkpointing(
            keys, checkpoints, of_arguments=f"{checkpoints}_kwargs"
        ),
        **transformers_keys.compilation(keys),
        **optimizer,
        "micro_batch_size": keys.whole_number("per_device_train_batch_size", least=1),
        **transformers_keys.liger(keys),
        **adapter,
    }
    if shared.checkpoints:
        config["checkpointing"] = "block"
    workload: dict[str, Any] = {
        **transformers_keys.batch(keys, devices_of(keys), shared.plan),
        "sequence_length": keys.whole_number("block_size", least=1),
        "streaming": keys.flag("streaming"),
        **transformers_keys.learning(
            keys,
            optimizer=optimizer["optimizer"],
            adapter=config.get("adapter", "none"),
            schedule_key="lr_scheduler_type",
        ),
    }
    if model or keys.text("config_name"):
        workload |= {"model": model or keys["config_name"], "pretrained": model is not None}
        workload["tokenizer"] = "model"
    if dataset := keys.text("dataset_name") or keys.text("train_file"):
        workload |= {"dataset": dataset, "dataset_config": keys.text("dataset_config_name")}
    if adapter:
        workload |= transformers_keys.beside_adapters(keys, dropout="lora_dropout")
    plan = transformers_keys.added_up(shared.plan, config["precision"])
    return finished(keys, workload=workload, config=config, plan=plan)


def _is_by_script_of_firefly(keys: KeysOfFile) -> bool:
    return keys.says("template_name") or keys.says("train_mode")


def _precision(keys: KeysOfFile, has_adapters: bool, shared: str | None) -> str:
    dtype = str(keys["dtype"]).removeprefix("torch.")
    if keys.flag("fp16") or shared == "fp16":
        return "fp16-mixed"
    if shared == "fp8" and not has_adapters:
        return "fp8"
    if keys.flag("bf16") or shared == "bf16":
        if dtype == "auto" and keys.says("model_name_or_path") and not has_adapters:
            keys.refuse(
                "bf16",
                "weights are taken to be float32; those of a checkpoint in bfloat16 take half of "
                "it: then give --precision bf16-true",
            )
        return "bf16-true" if dtype == "bfloat16" and not has_adapters else "bf16-mixed"
    if dtype == "bfloat16" and not has_adapters:
        return "bf16-true"
    return "tf32" if keys.flag("tf32") else "fp32"


def _adapter(keys: KeysOfFile) -> dict[str, Any]:
    """Returns what Firefly's script adds: it trains adapters over 4-bit weights by default."""
    if not _is_by_script_of_firefly(keys):
        return {}
    mode = str(keys["train_mode"] or "qlora")
    if mode == "full":
        return {}
    if mode not in ("lora", "qlora"):
        raise keys.invalid("train_mode", "full, lora or qlora")
    is_16_bit = keys.flag("bf16") or keys.flag("fp16")
    return {
        "adapter": "lora",
        "adapter_rank": keys.whole_number("lora_rank", least=1),
        "base_weights": "nf4" if mode == "qlora" else "bf16" if is_16_bit else "trained",
    }


TRAINER = Trainer(
    table=load_table("run_clm"),
    signs=frozenset(("per_device_train_batch_size", "model_name_or_path", "output_dir")),
    suffixes=(".json",),
    read=read,
)
