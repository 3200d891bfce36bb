"""transformers' Trainer: `autotune_trainer.py`, which does all that the trial did, and JSON, which can say part of it.

The refusals are those of `autotune_trainer.py`; what `training_args.json` and `model_kwargs.json`
alone lack is in a note. Names: https://huggingface.co/docs/transformers/main_classes/trainer
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from autotune.exporters import launch
from autotune.exporters.export import Export, Refusal, Target
from autotune.exporters.recipe import Recipe
from autotune.exporters.script_lines import own_script_note, text_notes
from autotune.exporters.trainer_keys import (
    FP16_ON_CPU,
    KEY_NOTES,
    LONGEST_ADAFACTOR_STEPS,
    Change,
    checkpointing_keys,
    model_keys,
    nearest,
    training_keys,
)
from autotune.exporters.transformers.trainer_code import FILE, trainer_code
from autotune.exporters.transformers.training_script import says_tokenizer, training_script
from autotune.spec.config import TrainingConfig

ARGUMENTS_FILE, MODEL_FILE = "training_args.json", "model_kwargs.json"
_IN_CODE: Mapping[str, Any] = {"tf32": None, "torch_compile": False}
"""Keys that autotune_trainer.py leaves as they are by themselves: it makes these settings by its
own code."""


def write(recipe: Recipe, version: str) -> Export:
    config = recipe.config
    said, changes = nearest(recipe, has_every_n_layers=version != "4.57")
    changes += _beyond_json(config)
    keys = training_keys(recipe, said, new_names=version == "5.23")
    files = {
        FILE: trainer_code(recipe, _keys_of_code(recipe, keys, version), version=version),
        **training_script(recipe),
        ARGUMENTS_FILE: json.dumps(keys, indent=2) + "\n",
        MODEL_FILE: json.dumps(model_keys(said), indent=2) + "\n",
    }
    if launch.is_needed(config):
        files[launch.FILE] = launch.launcher(recipe)
    notes = tuple(_notes(recipe, version, changes))
    return Export(files=files, command="python train.py", refusals=_refusals(recipe), notes=notes)


def _refusals(recipe: Recipe) -> tuple[Refusal, ...]:
    if not recipe.is_fp16_on_cpu:
        return ()
    return (
        Refusal(
            setting="precision", value=recipe.config.precision, instead="fp32", why=FP16_ON_CPU
        ),
    )


def _beyond_json(config: TrainingConfig) -> list[Change]:
    changes = []
    if config.loss == "chunked":
        changes.append(Change(setting="loss", instead="full", why="it has no key"))
    if config.activation_offload == "cpu":
        changes.append(Change(setting="activation_offload", instead="none", why="it has no key"))
    return changes


def _keys_of_code(recipe: Recipe, keys: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Where code does it, the keys must not do it too."""
    config = recipe.config
    plain = dataclasses.replace(config, checkpointing="none")
    has_key = config.checkpointing in ("block", "every-2", "every-4") and version != "4.57"
    by_keys = (
        has_key and config.compile != "block"
    )  # transformers would recompute outside what is compiled
    checkpointing = checkpointing_keys(
        (config if by_keys else plain).checkpointing, new_names=version == "5.23"
    )
    left = {
        name: value
        for name, value in keys.items()
        if name not in _IN_CODE
        and not name.startswith(("torch_compile_", "gradient_check", "activation_check"))
    }
    # Its optimizer may be another than the nearest one that has a name.
    return {
        **left,
        "learning_rate": recipe.workload.learning_rate_of(config.optimizer),
        **checkpointing,
    }


def _notes(recipe: Recipe, version: str, changes: list[Change]) -> list[str]:
    config, settings = recipe.config, recipe.settings()
    lacking = [
        f"{change.setting} {settings[change.setting]} ({change.instead} instead)"
        for change in changes
    ]
    lacking.append(f"sequence_length {recipe.workload.sequence_length} (cut by your script)")
    notes = [
        f"{ARGUMENTS_FILE} and {MODEL_FILE} alone lack: {', '.join(lacking)}; {'; '.join(KEY_NOTES)}"
    ]
    if launch.is_needed(config):
        notes.append(
            f"with {ARGUMENTS_FILE} alone start your script by `python {launch.FILE} train.py`, which makes the "
            f"settings of the process; {FILE} makes them by itself"
        )
    return [*notes, *_needs(recipe, version)]


def _needs(recipe: Recipe, version: str) -> list[str]:
    config, workload = recipe.config, recipe.workload
    notes = own_script_note(workload) + text_notes(
        workload, says_tokenizer=says_tokenizer(workload)
    )
    if version != "4.57" and config.checkpointing in ("every-2", "every-4"):
        notes.append(
            "every_n_layers needs transformers 5.16 or newer: older ones checkpoint every layer without a word"
        )
    if config.optimizer == "adamw-8bit" or config.precision == "fp8":
        notes.append("needs torchao: pip install torchao")
    if config.attention in ("flash", "cudnn"):
        notes.append(
            f"leave attention_mask out of the batches: attention {config.attention} takes no mask"
        )
    if config.optimizer_fusion == "backward":
        notes.append(
            "optimizer_fusion backward is for one device without accumulation; the norm of gradients is logged 0"
        )
    if config.loss == "chunked":
        notes.append(
            "loss chunked makes no logits where there are labels: evaluate with prediction_loss_only=True"
        )
    if (
        config.optimizer == "adafactor-fixed-rate"
        and recipe.workload.steps > LONGEST_ADAFACTOR_STEPS
    ):
        notes.append(
            f"optim adafactor in {ARGUMENTS_FILE} has no largest beta2: after step 5,623 it is another rule"
        )
    return notes


TARGET = Target(
    title="transformers Trainer",
    versions=("5", "5.23", "4.57"),
    checked_with="transformers 5.23.0, and 4.57.6 by hand",
    write=write,
)
