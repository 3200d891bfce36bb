"""trl's supervised fine-tuning: `sft.yaml`, and a launcher that compares it with the trial.

trl's defaults differ from those of transformers: bf16 and checkpointing are on. So the file always
specifies both. Names: https://huggingface.co/docs/trl/sft_trainer
"""

import dataclasses
from pathlib import PurePath
from typing import Any

from autotune.exporters import accelerate_config, launch
from autotune.exporters.adapters import (
    EXPERTS_NOTE,
    PATTERNS,
    base_dtype,
    lacks_beside_adapters,
    lacks_saved_dtype,
    lora_arguments,
    packages_note,
    trained_dtype,
)
from autotune.exporters.devices import closest_by_accelerate, divides_weights
from autotune.exporters.export import Export, Target
from autotune.exporters.filled_rows import fill_rows
from autotune.exporters.promise import OF_TRAINER, is_promised, promise_file, promised
from autotune.exporters.reasons import OF_EXPERTS, Reason, Values
from autotune.exporters.recipe import Recipe
from autotune.exporters.script_lines import text_notes, user_script_note
from autotune.exporters.trainer_keys import (
    HAS,
    KEY_NOTES,
    closest_config,
    masked_attention,
    model_keys,
    training_keys,
)
from autotune.exporters.transformers.training_script import LOADERS
from autotune.exporters.yaml_text import yaml_text
from autotune.spec.config import KEEPS_PRODUCTS, SELECTIVE, TrainingConfig
from autotune.spec.workload import STANDARD_LIBRARY_TEXT, Workload
from autotune.units import format_size

FILE = "sft.yaml"


def write(recipe: Recipe, version: str) -> Export:
    asked = recipe
    filled = fill_rows(recipe, "trl", is_expressed=_reads(recipe.workload))
    recipe = filled.recipe
    on_devices = closest_by_accelerate(recipe, "trl", _HAS)
    recipe = on_devices.recipe
    closest, lacking_keys = closest_config(recipe, has=_HAS)
    if recipe.config.checkpointing in SELECTIVE:
        if lacks := _kept(recipe.config):
            lacking_keys["checkpointing"] = lacks
        else:
            del lacking_keys["checkpointing"]
            closest = dataclasses.replace(closest, checkpointing="save-attention")
    lacking = _lacking(recipe, closest)
    if "precision" in lacking:  # which says more than what FSDP2 does to it
        on_devices.reasons.pop("precision", None)
    on_devices.lacks(lacking)
    on_devices.lacks(lacking_keys)
    if "attention" in lacking:
        closest = dataclasses.replace(closest, attention="auto")
    heading = (
        f"# {recipe.origin}: {recipe.config.describe()}\n"
        f"# Replace each <NAME> in capitals. {_measured_on(recipe.devices)}\n"
    )
    # The launcher makes the settings of the process; `attention` may not be one of them any more.
    # Nor is the mode of torch.compile, of which trl has the key.
    config = dataclasses.replace(recipe.config, attention=closest.attention, compile_mode="default")
    trial = promised(asked, on_devices.unsupported()) if is_promised(asked) else None
    started, command = accelerate_config.module_start(
        dataclasses.replace(recipe, config=config),
        f"trl.scripts.sft --config {FILE}",
        trial=trial,
    )
    by_trl = f"trl sft --config {FILE}"
    if accelerate_config.FILE in started:
        by_trl += f" --accelerate_config {accelerate_config.FILE}"
    has_launcher = launch.is_needed(config)
    notes = _notes(recipe, has_launcher=has_launcher)
    if launch.FILE not in started:
        command = by_trl
    elif not has_launcher:
        notes.append(f"{by_trl} trains the same, and compares nothing with the trial")
    files = {FILE: heading + yaml_text(_keys(recipe, closest)), **started}
    files |= {**promise_file(asked, OF_TRAINER), **filled.files}
    return Export(
        files=files,
        command=command,
        before_use=(*filled.before_use, *_before_use(recipe)),
        unsupported=on_devices.unsupported(),
        notes=(*notes, *accelerate_config.machines_note(recipe), *filled.notes),
    )


_SAVES_LESS = "its `selective: true` saves attention only; the trial saved matrix products"
_REENTRANT = "it refuses `selective: true` for adapters under DeepSpeed's stage 3"


def _kept(config: TrainingConfig) -> Reason | None:
    """Returns what trl does for checkpointing by operator; None if it does the same."""
    if config.checkpointing in KEEPS_PRODUCTS:
        return ("block", _SAVES_LESS)
    if config.adapter != "none" and config.engine == "deepspeed" and config.sharding == "zero3":
        return ("block", _REENTRANT)
    return None


def _lacking(recipe: Recipe, closest: TrainingConfig) -> dict[str, Reason]:
    """Returns what trl does differently, in addition to what transformers does."""
    config, is_padded = recipe.config, recipe.workload.packing == "padded"
    reasons = {
        **masked_attention(config, closest, is_padded=is_padded),
        **_lacking_adapter(recipe, closest),
    }
    if config.loss == "full":
        why = "it always computes the loss from chunks of the logits, which takes less memory"
        reasons["loss"] = ("chunked", why)
    return reasons


def _lacking_adapter(recipe: Recipe, closest: TrainingConfig) -> dict[str, Reason]:
    """Returns where trl has what is trained in another number format than a trial."""
    config = recipe.config
    if config.adapter == "none":
        return {}
    is_4_bit = config.base_weights == "nf4"
    reasons = lacks_saved_dtype(
        config,
        recipe.workload,
        made="bfloat16" if is_4_bit else base_dtype(closest),
        why="it trains modules_to_save in the number format of the frozen weights",
    )
    why = "its keys of adapters are one rank, one alpha and no start"
    reasons |= lacks_beside_adapters(
        config, recipe.workload, why, settings=(*PATTERNS, "adapter_init")
    )
    wanted = trained_dtype(config)
    made = "bfloat16" if is_4_bit else "float32"
    if wanted == made:
        return reasons
    why = (
        "it casts adapters beside 4-bit weights to bfloat16: half their memory, but small updates "
        "are lost"
    )
    if made == "float32":
        why = "peft has adapters in float32 beside 16-bit weights: twice their memory"
    short = {"bfloat16": "bf16", "float32": "fp32"}[made]
    by_fsdp = ""
    if divides_weights(config) and closest.precision.endswith("-mixed"):
        by_fsdp = " by FSDP2"
        why += ", and accelerate has FSDP2 round what goes into a block and comes out of it"
    instead = f"{closest.precision}{by_fsdp}, adapters in {short}"
    return {**reasons, "precision": (instead, why)}


def _keys(recipe: Recipe, closest: TrainingConfig) -> dict[str, Any]:
    return {
        **_model(recipe.workload),
        **_dataset(recipe.workload),
        "output_dir": "trainer_output",
        **training_keys(recipe, closest),
        "activation_offloading": closest.activation_offload == "cpu",
        "max_length": recipe.workload.sequence_length,
        **_packing(recipe.workload),
        **_adapter(closest, recipe.workload),
        **_learned(recipe.workload),
        "model_init_kwargs": model_keys(closest),
    }


def _adapter(config: TrainingConfig, workload: Workload) -> dict[str, Any]:
    """Returns the keys of peft; trl's own defaults are alpha 32 and a dropout of 0.05."""
    if config.adapter == "none":
        return {}
    arguments = lora_arguments(config, workload)
    experts = arguments.get("target_parameters")
    saved = (
        {"lora_modules_to_save": [*workload.modules_to_save]} if workload.modules_to_save else {}
    )
    return {
        "use_peft": True,
        "lora_r": arguments["r"],
        "lora_alpha": arguments["lora_alpha"],
        "lora_dropout": arguments["lora_dropout"],
        "lora_target_modules": [arguments["target_modules"]],
        **({"lora_target_parameters": experts} if experts else {}),
        "use_dora": config.adapter == "dora",
        "use_rslora": workload.adapter_scaling == "rslora",
        **saved,
    }


def _packing(workload: Workload) -> dict[str, Any]:
    if workload.packing != "packed":
        return {"packing": False}
    # `wrapped` cuts one stream of all texts, as the trial's packing does.
    return {"packing": True, "packing_strategy": "wrapped"}


def _model(workload: Workload) -> dict[str, Any]:
    return {"model_name_or_path": workload.model_source if workload.pretrained else "<MODEL>"}


def _reads(workload: Workload) -> bool:
    """Returns whether it reads the columns of a prompt as they are: by these names alone."""
    of_trl = ("prompt-completion", "prompt-completion-chat")
    return workload.prompts is not None and workload.prompts.name in of_trl


def _learned(workload: Workload) -> dict[str, bool]:
    if workload.prompts is not None:
        return {"completion_only_loss": workload.prompts.learned != "all"}
    return {"assistant_only_loss": True} if workload.chat_column is not None else {}


def _dataset(workload: Workload) -> dict[str, Any]:
    name = workload.dataset
    column = {}
    if not workload.learns_answers:
        column = {"dataset_text_field": workload.text_column or "text"}
    if name == STANDARD_LIBRARY_TEXT:
        return {"dataset_name": "<DATASET>", **column}
    loader = LOADERS.get(PurePath(name).suffix.lower())
    if loader is not None:
        return {
            "datasets": [{"path": loader, "data_files": name, "split": workload.dataset_split}],
            **column,
        }
    config = {"dataset_config": workload.dataset_config} if workload.dataset_config else {}
    return {"dataset_name": name, **config, "dataset_train_split": workload.dataset_split, **column}


def _measured_on(devices: int) -> str:
    if devices > 1:
        return f"""Measured on {devices} devices: with another number of
# processes the global batch is another one."""
    return """Measured on one device: on N devices the global batch is N times
# as large, unless gradient_accumulation_steps is divided by N."""


_HAS: Values = {**HAS, "adapter_targets": OF_EXPERTS}

_LARGEST_TILE = (4_096, 32_768)
"""Tokens and columns of the part of the logits that trl's loss computes at once
(`trl/kernels/chunked_logprob.py`). There are that many columns whatever the vocabulary."""


def _buffer_note(recipe: Recipe) -> str:
    tokens = recipe.config.micro_batch_size * recipe.workload.sequence_length
    rows, columns = min(tokens, _LARGEST_TILE[0]), _LARGEST_TILE[1]
    bytes_of_a_number = 4 if recipe.config.precision in ("fp32", "tf32") else 2
    size = format_size(rows * columns * bytes_of_a_number)
    return (
        f"its loss has a buffer of {rows:,} x {columns:,} numbers, {size}, whatever the "
        "vocabulary, where a trial has logits"
    )


_NEEDS_MARKS = (
    "needs {% generation %} around the answers in the chat template: trl puts it into the "
    "templates that it knows and stops with an error at others, which the trial could learn from"
)


def _before_use(recipe: Recipe) -> tuple[str, ...]:
    """Returns what to do about a chat template at which the command stops."""
    if recipe.marks_answers is not False:
        return ()
    return (
        f"the chat template of {recipe.workload.tokenizer} has no {{% generation %}}, and "
        f"assistant_only_loss {_NEEDS_MARKS}: write {{% generation %}} and {{% endgeneration %}} "
        "around the answers in a copy of it, say answers.jinja, and add chat_template_path: "
        f"answers.jinja to {FILE}",
    )


def _notes(recipe: Recipe, *, has_launcher: bool) -> list[str]:
    workload = recipe.workload
    notes = [*KEY_NOTES, *user_script_note(workload), *text_notes(workload)]
    if workload.chat_column is not None:
        if recipe.marks_answers is None:
            notes.append(f"assistant_only_loss {_NEEDS_MARKS}")
        notes.append(
            "trl learns every answer, also those with weight 0, train false or loss false, and "
            "reads no column system: put its text into the messages"
        )
        if workload.chat_column != "messages":
            notes.append(
                f"trl takes conversations for assistant_only_loss from the column messages only: "
                f"rename {workload.chat_column}, and from and value in it to role and content"
            )
    notes.append(_buffer_note(recipe))
    if has_launcher and recipe.devices == 1:
        notes.append(
            f"on several devices: accelerate launch {launch.FILE} -m trl.scripts.sft "
            f"--config {FILE}"
        )
    if not workload.pretrained and workload.script is None:
        notes.append(
            f"the trial's model was {workload.describe_model()} from random weights: trl needs a "
            "model with saved weights"
        )
    if recipe.config.checkpointing in ("every-2", "every-4"):
        notes.append(
            "every_n_layers needs transformers 5.16 or newer: older versions silently checkpoint "
            "every layer"
        )
    if recipe.config.activation_offload == "cpu":
        notes.append(
            "activation_offloading moves tensors of more than 1 KiB, in parallel with the "
            "computation; the trial moved those of more than 1 MiB, as a part of it"
        )
    notes += packages_note(recipe.config)
    if recipe.config.adapter_targets == "experts":
        notes.append(EXPERTS_NOTE)
    if recipe.config.adapter_targets == "attention":
        notes.append(
            "lora_target_modules is a pattern of the names that models of transformers have in "
            "their attention: compare the number of trained parameters with the trial's"
        )
    return notes


TARGET = Target(
    title="trl SFT", versions=("1.16",), checked_with="trl 1.16.0, transformers 5.23.0", write=write
)
