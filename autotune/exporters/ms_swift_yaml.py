"""ms-swift: a YAML file for `swift sft` (chat data) or `swift pt` (plain text).

ms-swift trains with transformers' Trainer and takes its keys. Its own defaults differ
(`swift/trainers/arguments.py`, `swift/arguments/` of version 4.6.0): checkpointing is on, weight
decay is 0.1, the second beta of Adam 0.95, the schedule a cosine, adapters have alpha 32 and a
dropout of 0.05, models come from ModelScope, and logits are made for answers only. So the file
always says what it wants of these.

The YAML file also has the environment of the process, in `ENV`, which `swift` sets before it starts
the processes (`swift/cli/main.py`), and names a file of Python that each of them runs first.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from autotune.exporters import launch
from autotune.exporters.adapters import (
    PATTERNS,
    base_dtype,
    lacks_beside_adapters,
    lacks_saved_dtype,
    lora_arguments,
    packages_note,
    storage_dtype,
    trained_dtype,
)
from autotune.exporters.deepspeed_config import AUTO_FILE, automatic, json_text
from autotune.exporters.devices import closest_by_accelerate, divides_weights, fsdp_keys
from autotune.exporters.export import Export, Target
from autotune.exporters.filled_rows import fill_rows
from autotune.exporters.reasons import Reason, Table, reasons_in
from autotune.exporters.recipe import Recipe, in_docstring
from autotune.exporters.script_lines import text_notes, user_script_note
from autotune.exporters.several_nodes import FIRST_NODE, note
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
from autotune.spec.workload import STANDARD_LIBRARY_TEXT, Workload
from autotune.system.allocator_settings import for_any_torch

FILE = "ms_swift.yaml"
SETTINGS_FILE = "autotune_settings.py"
DATASET_FILE = "dataset_info.json"
FSDP_FILE = "fsdp.json"


def write(recipe: Recipe, version: str) -> Export:
    filled = fill_rows(
        recipe, "ms-swift", is_expressed=_prompt_columns(recipe.workload) is not None
    )
    on_devices = closest_by_accelerate(filled.recipe, "ms-swift", HAS, has_groups=False)
    recipe = on_devices.recipe
    closest, lacking_keys = closest_config(recipe, has_every_n_layers=False)
    lacking = _lacking(recipe, closest)
    on_devices.lacks(lacking)
    on_devices.lacks(lacking_keys)
    config = recipe.config
    if "attention" in lacking:
        config = dataclasses.replace(config, attention="auto")
    others = {**_settings(recipe, config), **_data_files(recipe.workload), **_sharing(recipe)}
    keys = _keys(recipe, closest, others=list(others))
    heading = f"# {recipe.origin}\n# For ms-swift 4.6.\n"
    command = "sft" if recipe.workload.learns_answers else "pt"
    return Export(
        files={FILE: heading + yaml_text(keys, width=100), **others, **filled.files},
        command=f"swift {command} {FILE}",
        before_use=filled.before_use,
        unsupported=on_devices.unsupported(),
        notes=(
            *_notes(recipe),
            *note(recipe, f" in {FILE}, and NODE_RANK 1, 2, ... there on the others"),
            *filled.notes,
        ),
    )


_LIGER = "use_liger_kernel"
_LACKING: Table = {
    "checkpointing": {
        "every-4": ("block", "it hands every_n_layers to each block, which ignores it"),
        "every-2": ("block", "it hands every_n_layers to each block, which ignores it"),
    },
    "base_weights": {
        "int8": (
            "int8 by bitsandbytes",
            "its quant_bits: 8 is LLM.int8() of bitsandbytes, which treats outliers apart",
        ),
        "fp8": ("bf16", "its quant_method: fp8 is for models that are in 8 bits already"),
    },
    "activation_offload": {"cpu": ("none", "it moves activations with FSDP2 only")},
}


def _lacking(recipe: Recipe, closest: TrainingConfig) -> dict[str, Reason]:
    """Returns what ms-swift does differently, in addition to what transformers does."""
    config = recipe.config
    why = "its torch_dtype is that of the frozen weights and of modules_to_save alike"
    one = "all its adapters have one rank and one alpha"
    reasons = {
        **lacks_beside_adapters(config, recipe.workload, one, settings=PATTERNS),
        **reasons_in(_LACKING, config),
        **loss_with_liger(config, _LIGER),
        **lacks_saved_dtype(config, recipe.workload, made=base_dtype(closest), why=why),
    }
    if config.base_weights == "fp8" and config.precision != "bf16-mixed":
        instead = "fp16" if config.precision == "fp16-mixed" else "trained"
        reasons["base_weights"] = (instead, reasons["base_weights"][1])
    return {**reasons, **masked_attention(config, closest, is_padded=True)}


def _keys(recipe: Recipe, closest: TrainingConfig, *, others: list[str]) -> dict[str, Any]:
    """Returns the keys; `others` are the names of the files beside this one."""
    config, workload = recipe.config, recipe.workload
    named: dict[str, dict[str, Any]] = {
        FSDP_FILE: {"fsdp": FSDP_FILE},
        AUTO_FILE: {"deepspeed": AUTO_FILE},
        SETTINGS_FILE: {"external_plugins": [SETTINGS_FILE]},
        DATASET_FILE: {"custom_dataset_info": [DATASET_FILE]},
    }
    environment = _environment(recipe)
    return {
        **({"ENV": environment} if environment else {}),
        "model": workload.model_source or "PUT-YOUR-MODEL-HERE",
        "use_hf": True,
        "torch_dtype": base_dtype(closest),
        "attn_impl": "sdpa",
        **_data(workload),
        **_method(recipe, closest),
        "output_dir": "trainer_output",
        **without_liger_config(training_keys(recipe, closest), config, _LIGER),
        "use_logits_to_keep": False,
        **{key: value for file in others for key, value in named[file].items()},
    }


def _environment(recipe: Recipe) -> dict[str, Any]:
    """Returns the variables of the process; without a number of devices it would use all."""
    variables: dict[str, Any] = {}
    if recipe.devices > 1 or recipe.config.engine == "deepspeed":
        variables["NPROC_PER_NODE"] = recipe.devices_on_each_node
    if recipe.nodes > 1:
        variables |= {"NNODES": recipe.nodes, "NODE_RANK": 0, "MASTER_ADDR": FIRST_NODE}
    elif recipe.device_type == "cuda":
        variables["CUDA_VISIBLE_DEVICES"] = "0"
    if recipe.config.allocator == "expandable":
        variables |= for_any_torch(expandable=True)
    return variables


def _data(workload: Workload) -> dict[str, Any]:
    # ms-swift packs with the kernels of the package flash-attn alone.
    keys: dict[str, Any] = {
        "dataset": [_dataset(workload)],
        "columns": _columns(workload),
        "disable_auto_column_mapping": True,
        "max_length": workload.sequence_length,
        "packing": False,
    }
    if workload.learns_answers:
        learned = "answers" if workload.prompts is None else workload.prompts.learned
        keys |= {"loss_scale": _LOSS_SCALES[learned], "truncation_strategy": "right"}
        # Without parts around the prompt, but for the tokens that begin and end a text.
        return keys if workload.has_conversations else {**keys, "template": "dummy"}
    is_packed = workload.packing == "packed"
    return {**keys, "truncation_strategy": "split" if is_packed else "right"}


_LOSS_SCALES = {"answers": "default", "last": "last_round", "all": "all"}


def _prompt_columns(workload: Workload) -> dict[str, str] | None:
    """Returns ms-swift's names for the columns of a prompt; None for prompts that it cannot make.

    An instruction and an input are joined by a line break (AlpacaPreprocessor).
    """
    format = workload.prompts
    if format is None:
        return {}
    columns = format.bare_columns
    if columns is None or format.name == "prompt-completion-chat":  # whose columns are messages
        return None
    names = {"prompt": "instruction" if "input" in columns else "query", "answer": "response"}
    return {column: names.get(name, name) for name, column in columns.items()}


def _columns(workload: Workload) -> dict[str, str]:
    if workload.prompt_format is not None:
        return _prompt_columns(workload) or {}
    if workload.chat_column is not None:
        return {workload.chat_column: "messages"}
    return {workload.text_column or "text": "response"}


def _dataset(workload: Workload) -> str:
    if workload.dataset == STANDARD_LIBRARY_TEXT:
        return "PUT-YOUR-TEXT-HERE.txt"
    if not _is_file(workload) and workload.dataset_config is not None:
        return f"{workload.dataset}:{workload.dataset_config}"
    return workload.dataset


def _is_file(workload: Workload) -> bool:
    return (
        workload.dataset == STANDARD_LIBRARY_TEXT
        or PurePath(workload.dataset).suffix.lower() in LOADERS
    )


def _data_files(workload: Workload) -> dict[str, str]:
    """Returns the file that names the split of a dataset of the hub, where it is not `train`."""
    if _is_file(workload) or workload.dataset_split == "train":
        return {}
    entry = {"hf_dataset_id": workload.dataset, "split": [workload.dataset_split]}
    if workload.dataset_config is not None:
        entry["subsets"] = [workload.dataset_config]
    return {DATASET_FILE: json.dumps([entry], indent=2) + "\n"}


def _method(recipe: Recipe, closest: TrainingConfig) -> dict[str, Any]:
    """Returns the keys on what is trained; by default ms-swift trains adapters."""
    config = recipe.config
    if config.adapter == "none":
        return {"tuner_type": "full"}
    arguments = lora_arguments(config, recipe.workload)
    keys: dict[str, Any] = {
        "tuner_type": "lora",
        "lora_rank": arguments["r"],
        "lora_alpha": arguments["lora_alpha"],
        "lora_dropout": arguments["lora_dropout"],
        "lora_dtype": trained_dtype(closest),
        "use_dora": config.adapter == "dora",
        "use_rslora": recipe.workload.adapter_scaling == "rslora",
    }
    if "init_lora_weights" in arguments:
        keys["init_weights"] = arguments["init_lora_weights"]
    if "modules_to_save" in arguments:
        keys["modules_to_save"] = arguments["modules_to_save"]
    if config.adapter_targets == "all-linear":
        keys["target_modules"] = ["all-linear"]
    else:
        keys["target_regex"] = arguments["target_modules"]
    if config.base_weights in ("nf4", "int8"):
        keys["quant_method"] = "bnb"
        keys["quant_bits"] = 4 if config.base_weights == "nf4" else 8
    if config.base_weights == "nf4":
        keys["bnb_4bit_compute_dtype"] = base_dtype(closest)
        keys |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        if (packed_in := storage_dtype(closest)) is not None:
            keys["bnb_4bit_quant_storage"] = packed_in
    return keys


def _settings(recipe: Recipe, config: TrainingConfig) -> dict[str, str]:
    """Returns the file with settings of the process that only code can make."""
    lines = launch.with_torch(config)
    if not lines:
        return {}
    text = "\n".join(lines)
    origin = in_docstring(recipe.origin)
    return {
        SETTINGS_FILE: f'"""Process settings of {origin}, which ms-swift runs before it loads the '
        f'model."""\n\nimport torch\nimport torch._functorch.config\n\n{text}\n'
    }


def _sharing(recipe: Recipe) -> dict[str, str]:
    """Returns the file on what devices share out among them."""
    config = recipe.config
    if config.engine == "deepspeed":
        return {AUTO_FILE: json_text(automatic(recipe))}
    if not divides_weights(config):
        return {}
    options = "full_shard auto_wrap" + (" offload" if config.offload == "all" else "")
    keys = {"fsdp_version": 2, **fsdp_keys(config, offload="cpu_offload")}
    return {FSDP_FILE: json.dumps({"fsdp": options, "fsdp_config": keys}, indent=2) + "\n"}


def _notes(recipe: Recipe) -> Iterator[str]:
    workload, config = recipe.workload, recipe.config
    yield _NEVER_SHARED if recipe.devices > 1 or config.engine == "deepspeed" else _NEVER_RUN
    yield from KEY_NOTES
    yield from user_script_note(workload)
    yield from text_notes(workload)
    yield (
        "ms-swift knows models by their names: where it stops and asks for model_type or template, "
        f"add them to {FILE}"
    )
    if workload.model_source is None:
        yield "name your Hugging Face model in model: the study's has no folder or hub name"
    if not workload.pretrained and workload.script is None:
        yield (
            f"the trial's model was {workload.describe_model()} from random weights: ms-swift "
            "needs a model with saved weights"
        )
    if workload.packing == "packed":
        yield (
            "ms-swift packs with the package flash-attn alone: here each text fills sequences of "
            "its own, and the rest of the last one is padding; for packing: true write attn_impl: "
            "flash_attention_2 as well, in 16 bits"
        )
    else:
        yield "a batch is as long as its longest text; those of a trial are all sequence_length"
    if workload.has_conversations:
        yield (
            "ms-swift has chat templates of its own, which it chooses by the model; of loss: "
            "false it knows, of weight 0 and train: false it does not"
        )
    if _is_file(workload) and workload.dataset_split != "train":
        yield f"ms-swift reads all of {workload.dataset}, not only {workload.dataset_split}"
    if config.adapter == "dora":
        yield "the magnitudes of DoRA are in the number format of the model, not of the adapter"
    if config.adapter_targets == "attention":
        yield (
            "target_regex is a pattern of the names that models of transformers have in their "
            "attention: compare the number of trained parameters with the trial's"
        )
    yield from packages_note(config)


_NEVER_RUN = (
    "ms-swift 4.6.0 was trained with such files on a CPU, with adapters and without: on a GPU they "
    "were never run"
)
_NEVER_SHARED = "ms-swift 4.6.0 was never run on several devices, or with DeepSpeed, by such files"


TARGET = Target(
    title="ms-swift",
    versions=("4.6",),
    checked_with="ms-swift 4.6.0, transformers 5.19.0",
    write=write,
)
