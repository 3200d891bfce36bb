"""trl's supervised fine-tuning: `sft.yaml` for `trl sft --config`, and the launcher where the process has settings.

trl's defaults are others than transformers': bf16 and checkpointing are on where nothing is said,
so both are said. Names: https://huggingface.co/docs/trl/sft_trainer
"""

import dataclasses
from pathlib import PurePath
from typing import Any

import yaml

from autotune.exporters import launch
from autotune.exporters.export import Export, Refusal, Target
from autotune.exporters.recipe import Recipe
from autotune.exporters.script_lines import own_script_note, text_notes
from autotune.exporters.trainer_keys import KEY_NOTES, Change, model_keys, nearest, training_keys
from autotune.exporters.transformers.training_script import LOADERS
from autotune.spec.config import TrainingConfig
from autotune.spec.workload import STANDARD_LIBRARY_TEXT, Workload

FILE = "sft.yaml"


def write(recipe: Recipe, version: str) -> Export:
    said, changes = nearest(recipe)
    changes += _of_trl(recipe.config, said)
    said = (
        dataclasses.replace(said, attention="auto")
        if _masks_reach_the_kernel(recipe.config, said)
        else said
    )
    text = yaml.safe_dump(_keys(recipe, said), sort_keys=False, allow_unicode=True)
    # Of what is launched only the settings of the process matter, and of those `attention` may have
    # been refused.
    launched = dataclasses.replace(
        recipe, config=dataclasses.replace(recipe.config, attention=said.attention)
    )
    has_launcher = launch.is_needed(launched.config)
    return Export(
        files={
            FILE: _head(recipe) + text,
            **({launch.FILE: launch.launcher(launched)} if has_launcher else {}),
        },
        command=f"python {launch.FILE} -m trl.scripts.sft --config {FILE}"
        if has_launcher
        else f"trl sft --config {FILE}",
        refusals=tuple(_refusal(recipe, change) for change in changes),
        notes=tuple(_notes(recipe, has_launcher=has_launcher)),
    )


def _of_trl(config: TrainingConfig, said: TrainingConfig) -> list[Change]:
    changes = []
    if config.loss == "full":
        why = "it always makes the loss from chunks of the logits, which takes less memory"
        changes.append(Change(setting="loss", instead="chunked", why=why))
    if _masks_reach_the_kernel(config, said):
        why = "its batches have an attention_mask, of which compiled code makes a mask, and this kernel takes none"
        changes.append(Change(setting="attention", instead="auto", why=why))
    return changes


def _masks_reach_the_kernel(config: TrainingConfig, said: TrainingConfig) -> bool:
    return config.attention in ("flash", "cudnn") and said.compile != "none"


def _refusal(recipe: Recipe, change: Change) -> Refusal:
    value = recipe.settings()[change.setting]
    why = change.why
    if change.setting == "checkpointing" and value == "selective":
        why = (
            "its `selective: true` keeps attention only, where the trial kept every matrix product"
        )
    return Refusal(setting=change.setting, value=value, instead=change.instead, why=why)


def _keys(recipe: Recipe, said: TrainingConfig) -> dict[str, Any]:
    return {
        **_model(recipe.workload),
        **_dataset(recipe.workload),
        "output_dir": "trainer_output",
        **training_keys(recipe, said),
        "activation_offloading": said.activation_offload == "cpu",
        "max_length": recipe.workload.sequence_length,
        **_packing(recipe.workload),
        "model_init_kwargs": model_keys(said),
    }


def _packing(workload: Workload) -> dict[str, Any]:
    """`wrapped` cuts one stream of all texts, as the trial's packing does."""
    return (
        {"packing": True, "packing_strategy": "wrapped"}
        if workload.packing == "packed"
        else {"packing": False}
    )


def _model(workload: Workload) -> dict[str, Any]:
    return {"model_name_or_path": workload.model_source if workload.pretrained else "<MODEL>"}


def _dataset(workload: Workload) -> dict[str, Any]:
    name, column = workload.dataset, {"dataset_text_field": workload.text_column or "text"}
    if name == STANDARD_LIBRARY_TEXT:
        return {"dataset_name": "<DATASET>", **column}
    if loader := LOADERS.get(PurePath(name).suffix.lower()):
        return {
            "datasets": [{"path": loader, "data_files": name, "split": workload.dataset_split}],
            **column,
        }
    config = {"dataset_config": workload.dataset_config} if workload.dataset_config else {}
    return {"dataset_name": name, **config, "dataset_train_split": workload.dataset_split, **column}


def _head(recipe: Recipe) -> str:
    return f"""# {recipe.origin}: {recipe.config.describe()}
# Fill in what is in capitals between <>. Measured on one device: on N of them the global batch is N times as large,
# unless gradient_accumulation_steps is divided by N.
"""


def _notes(recipe: Recipe, *, has_launcher: bool) -> list[str]:
    workload, notes = recipe.workload, [*KEY_NOTES, *own_script_note(recipe.workload)]
    notes += text_notes(workload)
    if has_launcher:
        notes.append(
            f"on several devices: accelerate launch {launch.FILE} -m trl.scripts.sft --config {FILE}"
        )
    if not workload.pretrained and workload.script is None:
        notes.append(
            f"the trial's model was {workload.describe_model()} from random weights: trl wants one with weights"
        )
    if recipe.config.checkpointing in ("every-2", "every-4"):
        notes.append(
            "every_n_layers needs transformers 5.16 or newer: older ones checkpoint every layer without a word"
        )
    if recipe.config.activation_offload == "cpu":
        notes.append(
            "activation_offloading moves what is larger than 1 KiB, beside the computation; the trial 1 MiB, in it"
        )
    if recipe.config.optimizer == "adamw-8bit":
        notes.append("needs torchao: pip install torchao")
    return notes


TARGET = Target(
    title="trl SFT", versions=("1.16",), checked_with="trl 1.16.0, transformers 5.23.0", write=write
)
