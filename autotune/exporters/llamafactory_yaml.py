"""LLaMA-Factory: a YAML file for `llamafactory-cli train`, and `dataset_info.json` beside it.

LLaMA-Factory trains with transformers' Trainer and takes its keys. Around it, it decides for itself
(`src/llamafactory/` of version 0.9.5, commit 7af9095):

- it checkpoints every block, by the reentrant way, unless `disable_gradient_checkpointing` and
  `use_reentrant_gc` say otherwise (`model/model_utils/checkpointing.py`);
- it loads the model in the number format of its files (`model/loader.py`), and casts what is
  trained to float32 unless `pure_bf16` is set (`model/adapter.py`), which stops without a GPU
  (`hparams/parser.py`);
- it cuts one stream of all texts where `stage` is `pt` and nothing is said of `packing`; a
  `packing: true` makes sequences one token shorter (`hparams/data_args.py`);
- it starts a process on every GPU that it sees, with expandable segments (its module `launcher`).
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from autotune.exporters import accelerate_config
from autotune.exporters.adapters import (
    PATTERNS,
    lacks_beside_adapters,
    lacks_saved_dtype,
    lora_arguments,
    packages_note,
    trained_dtype,
)
from autotune.exporters.devices import Closest, closest_by_accelerate, divides_weights
from autotune.exporters.export import Export, Target
from autotune.exporters.filled_rows import fill_rows
from autotune.exporters.reasons import Reason, Table, reasons_in
from autotune.exporters.recipe import Recipe
from autotune.exporters.script_lines import text_notes, user_script_note
from autotune.exporters.trainer_keys import (
    HAS,
    KEY_NOTES,
    closest_config,
    loss_with_liger,
    masked_attention,
    training_keys,
    without_liger_config,
)
from autotune.exporters.transformers.training_script import LOADERS
from autotune.exporters.yaml_text import yaml_text
from autotune.spec.config import TrainingConfig
from autotune.spec.prompt_format import PromptFormat, columns_of
from autotune.spec.workload import SHAREGPT_COLUMN, STANDARD_LIBRARY_TEXT, Workload

FILE = "llamafactory.yaml"
DATASET_FILE = "dataset_info.json"
DATASET = "text_of_the_study"


def write(recipe: Recipe, version: str) -> Export:
    filled = fill_rows(recipe, "LLaMA-Factory", is_expressed=_columns(recipe.workload) is not None)
    recipe = filled.recipe
    on_devices = closest_by_accelerate(recipe, "LLaMA-Factory", HAS)
    _leave_out_pure_bf16(on_devices)
    _add_up_in_float32(on_devices)
    if on_devices.config.adapter == "dora" and on_devices.config.base_weights in _BY_BITSANDBYTES:
        on_devices.change("adapter", "lora", "it stops at DoRA over quantized weights")
    recipe = on_devices.recipe
    closest, lacking_keys = closest_config(recipe, has_every_n_layers=False, has_muon=True)
    lacking = _lacking(recipe, closest)
    on_devices.lacks(lacking)
    on_devices.lacks(lacking_keys)
    config = recipe.config
    if "attention" in lacking:
        config = dataclasses.replace(config, attention="auto")
    files = {
        FILE: f"# {recipe.origin}\n# For LLaMA-Factory 0.9.5.\n"
        + yaml_text(_keys(recipe, closest), width=100),
        DATASET_FILE: json.dumps({DATASET: _dataset(recipe.workload)}, indent=2) + "\n",
    }
    started, command = accelerate_config.module_start(
        dataclasses.replace(recipe, config=config), f"llamafactory.launcher {FILE}"
    )
    if not started:
        command = f"llamafactory-cli train {FILE}"
    if recipe.device_type == "cuda" and recipe.devices == 1:
        command = f"CUDA_VISIBLE_DEVICES=0 {command}"
    return Export(
        files={**files, **started, **filled.files},
        command=command,
        before_use=(*filled.before_use, *_before_use(recipe.workload)),
        unsupported=on_devices.unsupported(),
        notes=(
            *_notes(recipe, closest),
            *accelerate_config.machines_note(recipe),
            *filled.notes,
        ),
    )


def _leave_out_pure_bf16(closest: Closest) -> None:
    """Compute in bfloat16 under autocast where weights cannot be in it."""
    if closest.config.precision not in ("bf16-true", "bf16-stochastic"):
        return
    if closest.recipe.device_type == "cpu":
        closest.change("precision", "bf16-mixed", "its pure_bf16 stops on anything but a GPU")
    elif closest.config.engine == "deepspeed" and closest.config.sharding == "zero3":
        why = "its pure_bf16 stops with stage 3 of DeepSpeed's ZeRO"
        closest.change("precision", "bf16-mixed", why)


def _add_up_in_float32(closest: Closest) -> None:
    """Note that gradients of adapters are in float32 where nothing is under autocast."""
    config = closest.config
    is_in_16_bits = trained_dtype(config) != "float32"
    if config.adapter != "none" and is_in_16_bits and divides_weights(config):
        closest.reasons.pop("gradient_reduction", None)
        why = "it casts adapters to float32, in which FSDP2 then adds up their gradients"
        closest.differs("gradient_reduction", "fp32", why)


_LIGER = "enable_liger_kernel"
_LACKING: Table = {
    "precision": {
        "fp8": (
            "bf16-mixed",
            "its fp8: true sets the variable of accelerate after transformers has read it, so that "
            "nothing is converted",
        )
    },
    "checkpointing": {
        "every-4": ("block", "it checkpoints every block or none"),
        "every-2": ("block", "it checkpoints every block or none"),
    },
    "activation_offload": {
        "cpu": (
            "none",
            "its use_unsloth_gc: true moves only what a block begins with, and recomputes the rest",
        )
    },
}
_BY_BITSANDBYTES = ("nf4", "int8")
_OF_THE_FILES = "LLaMA-Factory loads weights in the number format of the model's files"
_BELOW_FLOAT32 = "bf16-true, adapters in fp32"


def _lacking(recipe: Recipe, closest: TrainingConfig) -> dict[str, Reason]:
    """Returns what LLaMA-Factory does differently, in addition to what transformers does."""
    config, is_padded = recipe.config, recipe.workload.packing == "padded"
    reasons = {
        **reasons_in(_LACKING, config),
        **loss_with_liger(config, _LIGER),
        **masked_attention(config, closest, is_padded=is_padded),
    }
    if config.adapter == "none":
        return reasons
    why = "all its adapters have one rank and one alpha"
    reasons |= lacks_beside_adapters(config, recipe.workload, why, settings=PATTERNS)
    why = "it casts all that is trained to float32: modules_to_save as well"
    reasons |= lacks_saved_dtype(config, recipe.workload, made="float32", why=why)
    is_mixed = closest.precision in ("bf16-mixed", "fp16-mixed")
    if not is_mixed:
        why = f"{_OF_THE_FILES}, here bfloat16, and has adapters in float32"
        reasons["precision"] = (_BELOW_FLOAT32, why)
    if config.base_weights == "int8":
        why = "its quantization_bit: 8 is LLM.int8() of bitsandbytes, which treats outliers apart"
        reasons["base_weights"] = ("int8 by bitsandbytes", why)
    elif config.base_weights == "fp8":
        why = f"{_OF_THE_FILES}, and has no format of 8-bit floats"
        reasons["base_weights"] = ("bf16" if is_mixed else "trained", why)
    elif config.base_weights == "trained" and is_mixed:
        why = f"{_OF_THE_FILES}, here bfloat16: half the memory for frozen ones"
        reasons["base_weights"] = ("bf16", why)
    elif config.base_weights == "fp16":
        reasons["base_weights"] = ("bf16", f"{_OF_THE_FILES}, here bfloat16")
    return reasons


def _keys(recipe: Recipe, closest: TrainingConfig) -> dict[str, Any]:
    config, workload = recipe.config, recipe.workload
    keys = without_liger_config(training_keys(recipe, closest), config, _LIGER)
    checkpoints = keys.pop("gradient_checkpointing")
    keys.pop("gradient_checkpointing_kwargs", None)
    return {
        "model_name_or_path": workload.model_source or "PUT-YOUR-MODEL-HERE",
        "train_from_scratch": not workload.pretrained,
        "flash_attn": "sdpa",
        **_data(workload),
        "do_train": True,
        **_method(config, workload),
        "output_dir": "trainer_output",
        **keys,
        "use_muon": closest.optimizer == "muon",
        "pure_bf16": closest.precision == "bf16-true",
        "disable_gradient_checkpointing": not checkpoints,
        "use_reentrant_gc": False,
    }


def _data(workload: Workload) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "stage": "sft" if workload.learns_answers else "pt",
        "dataset": DATASET,
        "dataset_dir": ".",
        "cutoff_len": workload.sequence_length,
    }
    format = workload.prompts
    if workload.learns_answers:
        learned = "answers" if format is None else format.learned
        keys |= {"train_on_prompt": learned == "all", "mask_history": learned == "last"}
        if not workload.has_conversations:
            keys["template"] = "empty"
        keys |= {"packing": workload.packing == "packed", "neat_packing": False}
    elif workload.packing != "packed":
        keys["packing"] = False
    return keys


def _method(config: TrainingConfig, workload: Workload) -> dict[str, Any]:
    """Returns the keys on what is trained; by default LLaMA-Factory trains adapters."""
    if config.adapter == "none":
        return {"finetuning_type": "full"}
    arguments = lora_arguments(config, workload)
    keys: dict[str, Any] = {
        "finetuning_type": "lora",
        "lora_rank": arguments["r"],
        "lora_alpha": arguments["lora_alpha"],
        "lora_dropout": arguments["lora_dropout"],
        "lora_target": "all"
        if config.adapter_targets == "all-linear"
        else ",".join(ATTENTION_NAMES),
        "use_dora": config.adapter == "dora",
        "use_rslora": workload.adapter_scaling == "rslora",
        "pissa_init": workload.adapter_init == "pissa",
    }
    if workload.modules_to_save:
        keys["additional_target"] = ",".join(workload.modules_to_save)
    if config.base_weights in _BY_BITSANDBYTES:
        keys["quantization_method"] = "bnb"
        keys["quantization_bit"] = 4 if config.base_weights == "nf4" else 8
    if config.base_weights == "nf4":
        keys |= {"quantization_type": "nf4", "double_quantization": True}
    return keys


ATTENTION_NAMES = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_a_proj", "q_b_proj"),
    *("kv_a_proj_with_mqa", "kv_b_proj", "query_key_value", "Wqkv", "c_attn"),
    *(
        f"{attention}.{output}"
        for attention in ("self_attn", "self_attention", "attention", "attn")
        for output in ("dense", "out_proj", "c_proj")
    ),
)
"""Ends of names of linear layers in the attention of models in transformers, for `lora_target`.

It takes a list of names alone: peft compares each with the end of a layer's name.
"""


def _dataset(workload: Workload) -> dict[str, Any]:
    """Returns the entry of `dataset_info.json` (`data/README.md` of LLaMA-Factory)."""
    entry: dict[str, Any]
    if workload.dataset == STANDARD_LIBRARY_TEXT:
        entry = {"file_name": "PUT-YOUR-TEXT-HERE.txt"}
    elif PurePath(workload.dataset).suffix.lower() in LOADERS:
        entry = {"file_name": workload.dataset, "split": workload.dataset_split}
    else:
        entry = {"hf_hub_url": workload.dataset, "split": workload.dataset_split}
        if workload.dataset_config is not None:
            entry["subset"] = workload.dataset_config
    if workload.prompt_format is not None:
        return {**entry, **(_columns(workload) or {})}
    if workload.chat_column is None:
        # A text is the prompt of a sample without an answer.
        return {**entry, "columns": {"prompt": workload.text_column or "text"}}
    entry |= {"formatting": "sharegpt", "columns": {"messages": workload.chat_column}}
    if workload.chat_column != SHAREGPT_COLUMN:
        entry["tags"] = {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
            "system_tag": "system",
            "observation_tag": "tool",
        }
    return entry


def _columns(workload: Workload) -> dict[str, Any] | None:
    """Returns what the entry says of a prompt's columns; None for prompts that it cannot make."""
    format = workload.prompts
    if format is None:
        return {}
    if format.messages:
        return _tags(format)
    columns = format.bare_columns
    if columns is None or format.name == "prompt-completion-chat":  # whose columns are messages
        return None
    return {"columns": {_NAMES.get(name, name): column for name, column in columns.items()}}


_NAMES = {"input": "query", "answer": "response"}


def _tags(format: PromptFormat) -> dict[str, Any] | None:
    """Returns the entry of messages with other names than usual."""
    names = {
        "user": "user_tag",
        "assistant": "assistant_tag",
        "tool": "observation_tag",
        "system": "system_tag",
    }
    columns, systems = {"messages": format.messages}, columns_of(format.system)
    if systems:
        columns["system"] = systems[0]
    if format.default_system or format.system != "".join(f"{{{one}}}" for one in systems[:1]):
        return None
    tags = {"role_tag": format.role, "content_tag": format.content}
    for source, target in {**{name: name for name in names}, **format.roles}.items():
        tags[names.get(target, target)] = source
    return {"formatting": "sharegpt", "columns": columns, "tags": tags}


def _before_use(workload: Workload) -> tuple[str, ...]:
    suffix = PurePath(workload.dataset).suffix.lower()
    if LOADERS.get(suffix) != "text" or suffix == ".txt":
        return ()
    return (
        f"LLaMA-Factory reads text from files whose names end in .txt: copy {workload.dataset} to "
        f"one, and name that in {DATASET_FILE}",
    )


def _notes(recipe: Recipe, closest: TrainingConfig) -> Iterator[str]:
    workload, config = recipe.workload, recipe.config
    yield from KEY_NOTES
    yield from user_script_note(workload)
    yield from text_notes(workload)
    if config.adapter != "none" or closest.precision == "bf16-true":
        yield (
            f"{_OF_THE_FILES}, and there is no key for another one: these files are for a model "
            "in bfloat16, as dtype or torch_dtype in its config.json says"
        )
    if workload.model_source is None:
        yield (
            "name your Hugging Face model in model_name_or_path: the study's model has no folder "
            "or hub name"
        )
    if not workload.pretrained:
        yield (
            "train_from_scratch: true draws new weights, as the study did; set it to false to "
            "start from trained ones"
        )
    if workload.packing == "padded":
        yield "a batch is as long as its longest text; those of a trial are all sequence_length"
    if workload.has_conversations:
        yield from _chat_notes(workload)
    elif workload.prompt_format is not None:
        yield (
            "template: empty adds neither the token that begins a text nor the one that ends it, "
            "which the trial learned: write the latter at the end of each answer where it matters"
        )
    if config.adapter_targets == "attention":
        yield (
            "lora_target has the names that models of transformers have in their attention: "
            "compare the number of trained parameters with the trial's"
        )
    if config.adapter != "none" and recipe.optimizer.package == "torchao":
        yield (
            "peft 0.18.1, which LLaMA-Factory asks for, cannot add adapters where torchao 0.18 is "
            "installed: it was tried with torchao 0.16"
        )
    yield from packages_note(config)
    if recipe.device_type == "cuda":
        yield _NEVER_RUN if not accelerate_config.is_shared(recipe) else _NEVER_SHARED


_NEVER_RUN = (
    "LLaMA-Factory 0.9.5 was trained with such files on a CPU, with adapters and without: on a GPU "
    "they were never run"
)
_NEVER_SHARED = (
    f"LLaMA-Factory 0.9.5 was never started with {accelerate_config.FILE}: the file is checked by "
    "accelerate alone"
)


def _chat_notes(workload: Workload) -> Iterator[str]:
    yield (
        "LLaMA-Factory takes the parts around messages from the tokenizer's chat template, which "
        "works for plain ones: name the model's own in template: where it has one"
    )
    yield (
        "it learns every answer, also those with weight 0, train false or loss false, and leaves "
        "out conversations in which user and assistant do not take turns"
    )
    if workload.packing == "packed":
        yield (
            "packing fills a sequence with whole conversations; a trial cuts one stream of all "
            "of them"
        )


TARGET = Target(
    title="LLaMA-Factory",
    versions=("0.9",),
    checked_with="llamafactory 0.9.5, transformers 5.6.0",
    write=write,
)
