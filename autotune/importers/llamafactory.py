"""LLaMA-Factory: the YAML file of `llamafactory-cli train`.

Its own choices decide memory: blocks are recomputed unless the file turns that off, what is trained
is in float32 unless pure_bf16, and LoRA of rank 8 on all linear layers is the default.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from autotune.importers import transformers_keys
from autotune.importers.finished import devices_of, finished
from autotune.importers.imported import ImportedTraining, Trainer
from autotune.importers.key_table import load_table
from autotune.importers.keys_of_file import KeysOfFile
from autotune.importers.trainer_file import read_trainer_file
from autotune.spec.prompt_format import Learned, PromptFormat
from autotune.spec.user_paths import expanded, path_exists

_ATTENTIONS = {
    "auto": "sdpa",
    "sdpa": "sdpa",
    "disabled": "eager",
    "fa2": "flash_attention_2",
    "fa3": "flash_attention_3",
    # Earlier versions: `flash_attn: true`.
    "True": "flash_attention_2",
    "False": "eager",
}
_STAGES = ("pt", "sft", "rm", "ppo", "dpo", "kto")
_METHODS = ("lora", "full", "freeze", "oft")


def read(keys: KeysOfFile) -> ImportedTraining:
    """Returns the training. Raises InvalidInput."""
    stage = keys.one_of("stage", _STAGES)
    if stage not in ("pt", "sft"):
        keys.refuse("stage", "trials learn the next token, without a second model")
    shared = transformers_keys.sharing(keys)
    adapter = _adapter(keys)
    _check_methods(keys, has_adapters=bool(adapter))
    optimizer = transformers_keys.optimizer(keys, "optim", has_adapters=bool(adapter))
    if keys.flag("use_muon"):
        optimizer = {"optimizer": "muon", "optimizer_fusion": "none"}
    config: dict[str, Any] = {
        "precision": _precision(keys, bool(adapter), shared.precision),
        "checkpointing": "none" if keys.flag("disable_gradient_checkpointing") else "block",
        **transformers_keys.compilation(keys),
        **optimizer,
        "micro_batch_size": keys.whole_number("per_device_train_batch_size", least=1),
        "attention": _attention(keys),
        **_liger(keys, stage),
        **adapter,
    }
    packs = keys.flag("packing") if keys.says("packing") else stage == "pt"
    workload: dict[str, Any] = {
        "model": keys.text("model_name_or_path"),
        "pretrained": not keys.flag("train_from_scratch"),
        "tokenizer": "model",
        **transformers_keys.batch(keys, devices_of(keys), shared.plan),
        "sequence_length": keys.whole_number("cutoff_len", least=1),
        "packing": "packed" if packs else "padded",
        "streaming": keys.flag("streaming"),
        **transformers_keys.learning(
            keys,
            optimizer=optimizer["optimizer"],
            adapter=config.get("adapter", "none"),
            schedule_key="lr_scheduler_type",
        ),
        **_dataset(keys),
    }
    if adapter:
        workload |= transformers_keys.beside_adapters(
            keys, dropout="lora_dropout", rslora="use_rslora", modules="additional_target"
        )
        workload.setdefault("adapter_alpha", 2 * config["adapter_rank"])  # its own default
        start = f"pissa_niter_{keys['pissa_iter']}"
        if keys.flag("pissa_init"):
            workload |= transformers_keys.adapter_start(keys, "pissa_iter", start)
    # What peft trains is in float32, and so are its gradients where nothing is under autocast.
    autocasts = keys.flag("bf16") or keys.flag("fp16") or shared.precision is not None
    added_in = config["precision"] if autocasts or not adapter else "fp32"
    plan = transformers_keys.added_up(shared.plan, added_in)
    return finished(keys, workload=workload, config=config, plan=plan)


def _precision(keys: KeysOfFile, has_adapters: bool, shared: str | None) -> str:
    if keys.flag("fp8"):
        return "fp8" if not has_adapters else "bf16-mixed"
    if keys.flag("fp16") or shared == "fp16":
        return "fp16-mixed"
    if keys.flag("pure_bf16") and not has_adapters:  # which peft has in float32 in any case
        return "bf16-true"
    # Frozen weights have the number format of the model's files, also where they are drawn anew,
    # which is taken to be bfloat16.
    if keys.flag("bf16") or shared == "bf16" or has_adapters:
        return "bf16-mixed"
    return "tf32" if keys.flag("tf32") else "fp32"


def _check_methods(keys: KeysOfFile, *, has_adapters: bool) -> None:
    """Raise InvalidInput for a method of its own whose state decides the memory."""
    for key in ("use_galore", "use_apollo", "use_badam", "use_adam_mini"):
        if keys.flag(key) and not has_adapters:
            raise keys.cannot_train(
                key,
                "autotune has no such optimizer, and its state decides the memory",
                hint="save a copy of the file without it",
            )
        if keys.flag(key):
            keys.refuse(key, "trials have adamw, whose state is small beside frozen weights")


def _liger(keys: KeysOfFile, stage: str | None) -> dict[str, str]:
    key = "use_liger_kernel" if keys.flag("use_liger_kernel") else "enable_liger_kernel"
    found = transformers_keys.liger(keys, key)
    # Other stages compare logits (src/llamafactory/model/model_utils/liger_kernel.py).
    return found if stage in ("pt", "sft") else {**found, "loss": "full"}


def _attention(keys: KeysOfFile) -> str:
    name = str(keys["flash_attn"])
    if name not in _ATTENTIONS:
        raise keys.invalid("flash_attn", "auto, sdpa, disabled, fa2 or fa3")
    return transformers_keys.attention(keys, "flash_attn", _ATTENTIONS[name])


def _adapter(keys: KeysOfFile) -> dict[str, Any]:
    method = keys.one_of("finetuning_type", _METHODS)
    if method in ("freeze", "oft"):
        raise keys.cannot_train(
            "finetuning_type",
            "trials train all weights, or adapters of the kinds lora and dora",
            hint="save a copy of the file with finetuning_type: lora or full",
        )
    if method == "full":
        return {}
    targets = keys["lora_target"]
    return {
        "adapter": "dora" if keys.flag("use_dora") else "lora",
        "adapter_rank": keys.whole_number("lora_rank", least=1),
        "adapter_targets": transformers_keys.adapter_layers(keys, "lora_target", targets),
        "base_weights": _base_weights(keys),
    }


def _base_weights(keys: KeysOfFile) -> str:
    bits = keys.whole_number("quantization_bit", least=1)
    if bits is not None and keys["quantization_method"] not in ("bnb", "bitsandbytes"):
        keys.refuse("quantization_method", "4 and 8 bits of trials are nf4 and int8")
    if bits == 8:
        return "int8"
    if bits is not None:
        if bits != 4:
            keys.refuse("quantization_bit", "trials have nf4, the nearest of 4 and 8 bits")
        if keys["quantization_type"] != "nf4":
            keys.refuse("quantization_type", "4-bit weights of trials are nf4")
        if not keys.flag("double_quantization"):
            keys.refuse("double_quantization", "trials have the scales of 4-bit weights quantized")
        return "nf4"
    return "bf16"


def _dataset(keys: KeysOfFile) -> dict[str, Any]:
    """Returns the first dataset: a path, or what dataset_info.json says of its name."""
    learned, is_chat = _learned(keys), keys["template"] != "empty"
    names = keys["dataset"]
    names = names if isinstance(names, list) else str(names or "").split(",")
    name = str(names[0]).strip() if names else ""
    if not name:
        return {}
    if len(names) > 1:
        keys.refuse("dataset", "trials read the first of several datasets")
    info = _dataset_info(keys).get(name)
    if isinstance(info, Mapping):
        return _of_info(keys, info, learned, is_chat)
    if PurePath(name).suffix or "/" in name:
        return {"dataset": name}
    keys.refuse("dataset", "a name of a dataset_info.json that is not here: give --dataset")
    return {}


_INFO = "dataset_info.json"


def _folder(keys: KeysOfFile) -> Path:
    """Returns the folder of the datasets: beside the file, or from that of the command."""
    beside, folder = expanded(str(keys.file)).parent, keys.text("dataset_dir") or ""
    candidates = (beside / folder, expanded(folder or "."), beside)
    there = [one for one in candidates if path_exists(str(one / _INFO))]
    return there[0] if there else candidates[0]


def _dataset_info(keys: KeysOfFile) -> Mapping[str, Any]:
    """Returns {name of a dataset: where it is} of the file beside, if there is one."""
    if keys.is_alone:
        return {}
    file = _folder(keys) / _INFO
    return read_trainer_file(file) if path_exists(str(file)) else {}


def _of_info(
    keys: KeysOfFile, info: Mapping[str, Any], learned: Learned, is_chat: bool
) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    columns = info.get("columns")
    columns = columns if isinstance(columns, Mapping) else {}
    if isinstance(hub := info.get("hf_hub_url"), str):
        settings["dataset"] = hub
    elif isinstance(name := info.get("file_name"), str):
        settings["dataset"] = str(_folder(keys) / name)
    else:
        keys.refuse("dataset", "neither a file nor a name of the hub: give --dataset")
        return {}
    for key, setting in (("subset", "dataset_config"), ("split", "dataset_split")):
        if isinstance(info.get(key), str):
            settings[setting] = info[key]
    if keys["stage"] == "pt":
        settings["text_column"] = str(columns.get("prompt", "text"))
    elif info.get("formatting", "alpaca") == "alpaca":
        format = _of_columns(keys, columns or _USUAL_COLUMNS)
        if format is not None:
            format = replace(format, learned=learned, is_chat=is_chat)
            settings["prompt_format"] = format.to_dict()
    else:
        settings |= _of_messages(info, columns, learned)
    return settings


_USUAL_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
"""Where a dataset names no columns; one that it does not name beside others is not read. Source:
LLaMA-Factory 0.9.5, src/llamafactory/data/parser.py, DatasetAttr."""


def _of_columns(keys: KeysOfFile, columns: Mapping[str, Any]) -> PromptFormat | None:
    """Returns the format of rows of columns, None where some are missing."""
    found = {name: f"{{{column}}}" for name, column in columns.items() if column}
    asked = [found[name] for name in ("prompt", "query") if name in found]
    if not asked or "response" not in found:
        keys.refuse("dataset", "it names no columns of a prompt and its response")
        return None
    return PromptFormat(
        prompt="\n".join(asked),
        shorter_prompt=asked[0] if len(asked) > 1 else "",
        answer=found["response"],
        system=found.get("system", ""),
        history=str(columns.get("history") or ""),
    )


def _learned(keys: KeysOfFile) -> Learned:
    learns_prompts, learns_last = keys.flag("train_on_prompt"), keys.flag("mask_history")
    return "all" if learns_prompts else "last" if learns_last else "answers"


_TAGS = {
    "role_tag": ("from", "role"),
    "content_tag": ("value", "content"),
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call",),
    "system_tag": ("system",),
}
"""{key of `tags`: its default, and what else needs no format}. Defaults as those of columns."""
_ROLES = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "assistant",
    "system_tag": "system",
}


def _of_messages(
    info: Mapping[str, Any], columns: Mapping[str, Any], learned: Learned
) -> dict[str, Any]:
    """Returns the column of conversations, or the format of those with other names than usual."""
    given = info.get("tags")
    given = given if isinstance(given, Mapping) else {}
    tags = {key: str(given.get(key) or usual[0]) for key, usual in _TAGS.items()}
    column, system = str(columns.get("messages") or "conversations"), columns.get("system")
    is_usual = all(tags[key] in usual for key, usual in _TAGS.items())
    if is_usual and system in (None, "system") and learned == "answers":
        return {"text_column": column}
    format = PromptFormat(
        messages=column,
        role=tags["role_tag"],
        content=tags["content_tag"],
        roles={tags[key]: role for key, role in _ROLES.items()},
        system=f"{{{system}}}" if system else "",
        learned=learned,
    )
    return {"prompt_format": format.to_dict()}


TRAINER = Trainer(
    table=load_table("llamafactory"),
    signs=frozenset(("finetuning_type", "stage", "cutoff_len")),
    read=read,
)
