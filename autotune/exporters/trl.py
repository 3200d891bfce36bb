"""trl's supervised fine-tuning: `sft.yaml` for `trl sft --config`, and a launcher if one is needed.

trl's defaults differ from those of transformers: bf16 and checkpointing are on. So the file always
specifies both. Names: https://huggingface.co/docs/trl/sft_trainer
"""

import dataclasses
from pathlib import PurePath
from typing import Any

from autotune.exporters import launch
from autotune.exporters.export import Export, Target, Unsupported
from autotune.exporters.recipe import Recipe
from autotune.exporters.script_lines import text_notes, user_script_note
from autotune.exporters.trainer_keys import (
    KEY_NOTES,
    Change,
    closest_config,
    model_keys,
    training_keys,
)
from autotune.exporters.transformers.training_script import LOADERS
from autotune.exporters.yaml_text import yaml_text
from autotune.spec.config import TrainingConfig
from autotune.spec.workload import STANDARD_LIBRARY_TEXT, Workload

FILE = "sft.yaml"


def write(recipe: Recipe, version: str) -> Export:
    closest, changes = closest_config(recipe)
    trl_changes = _trl_changes(recipe.config, closest)
    changes += trl_changes
    if any(change.setting == "attention" for change in trl_changes):
        closest = dataclasses.replace(closest, attention="auto")
    text = yaml_text(_keys(recipe, closest))
    files = {FILE: _head(recipe) + text}
    command = f"trl sft --config {FILE}"
    # The launcher makes the settings of the process; `attention` may not be one of them any more.
    launcher_config = dataclasses.replace(recipe.config, attention=closest.attention)
    has_launcher = launch.is_needed(launcher_config)
    if has_launcher:
        launcher_recipe = dataclasses.replace(recipe, config=launcher_config)
        files[launch.FILE] = launch.launcher(launcher_recipe)
        command = f"python {launch.FILE} -m trl.scripts.sft --config {FILE}"
    return Export(
        files=files,
        command=command,
        unsupported=tuple(_unsupported(recipe, change) for change in changes),
        notes=tuple(_notes(recipe, has_launcher=has_launcher)),
    )


def _trl_changes(config: TrainingConfig, closest: TrainingConfig) -> list[Change]:
    """Return what trl does differently, in addition to what transformers does."""
    changes = []
    if config.loss == "full":
        why = "it always computes the loss from chunks of the logits, which takes less memory"
        changes.append(Change(setting="loss", instead="chunked", why=why))
    if config.attention in ("flash", "cudnn") and closest.compile != "none":
        why = (
            "its batches have an attention_mask, which compiled code turns into a mask, and this "
            "kernel takes none"
        )
        changes.append(Change(setting="attention", instead="auto", why=why))
    return changes


def _unsupported(recipe: Recipe, change: Change) -> Unsupported:
    value = recipe.settings()[change.setting]
    why = change.why
    if change.setting == "checkpointing" and value == "selective":
        why = "its `selective: true` saves attention only; the trial saved every matrix product"
    return Unsupported(setting=change.setting, value=value, instead=change.instead, why=why)


def _keys(recipe: Recipe, closest: TrainingConfig) -> dict[str, Any]:
    return {
        **_model(recipe.workload),
        **_dataset(recipe.workload),
        "output_dir": "trainer_output",
        **training_keys(recipe, closest),
        "activation_offloading": closest.activation_offload == "cpu",
        "max_length": recipe.workload.sequence_length,
        **_packing(recipe.workload),
        "model_init_kwargs": model_keys(closest),
    }


def _packing(workload: Workload) -> dict[str, Any]:
    if workload.packing != "packed":
        return {"packing": False}
    # `wrapped` cuts one stream of all texts, as the trial's packing does.
    return {"packing": True, "packing_strategy": "wrapped"}


def _model(workload: Workload) -> dict[str, Any]:
    return {"model_name_or_path": workload.model_source if workload.pretrained else "<MODEL>"}


def _dataset(workload: Workload) -> dict[str, Any]:
    name = workload.dataset
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


def _head(recipe: Recipe) -> str:
    return f"""# {recipe.origin}: {recipe.config.describe()}
# Replace each <NAME> in capitals. Measured on one device: on N devices the global batch is N times
# as large, unless gradient_accumulation_steps is divided by N.
"""


def _notes(recipe: Recipe, *, has_launcher: bool) -> list[str]:
    workload = recipe.workload
    notes = [*KEY_NOTES, *user_script_note(workload), *text_notes(workload)]
    if has_launcher:
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
    if recipe.config.optimizer == "adamw-8bit":
        notes.append("needs torchao: pip install torchao")
    return notes


TARGET = Target(
    title="trl SFT", versions=("1.16",), checked_with="trl 1.16.0, transformers 5.23.0", write=write
)
