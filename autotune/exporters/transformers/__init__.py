"""transformers' Trainer: `autotune_trainer.py`, and JSON files of its arguments.

`autotune_trainer.py` does all that the trial did. `training_args.json` and `model_kwargs.json`
alone can express a part of it. The refusals are those of `autotune_trainer.py`; a note lists what
the JSON files lack. Names: https://huggingface.co/docs/transformers/main_classes/trainer
"""

import json
from collections.abc import Mapping
from typing import Any

from autotune.exporters import launch
from autotune.exporters.adapters import packages_note
from autotune.exporters.deepspeed_config import automatic
from autotune.exporters.devices import Closest, divides_weights, fit_accelerate, fsdp_keys
from autotune.exporters.export import Export, Target
from autotune.exporters.promise import OF_TRAINER, promise_file, promised
from autotune.exporters.reasons import OF_EXPERTS, WITH_KERNELS, Reason, Table, reasons_in
from autotune.exporters.recipe import Recipe
from autotune.exporters.script_lines import text_notes, user_script_note
from autotune.exporters.several_nodes import note, torchrun
from autotune.exporters.trainer_keys import (
    FP16_ON_CPU,
    KEY_NOTES,
    LONGEST_ADAFACTOR_STEPS,
    checkpointing_keys,
    closest_config,
    model_keys,
    training_keys,
)
from autotune.exporters.transformers.trainer_code import FILE, trainer_code
from autotune.exporters.transformers.training_script import says_tokenizer, training_script
from autotune.spec.config import DEPENDENT_FIELDS, TrainingConfig

ARGUMENTS_FILE, MODEL_FILE = "training_args.json", "model_kwargs.json"
_IN_CODE: Mapping[str, Any] = {"tf32": None, "torch_compile": False}
"""Keys that autotune_trainer.py leaves at their defaults, because its code makes these settings."""


def write(recipe: Recipe, version: str) -> Export:
    asked = recipe
    on_devices = _closest(recipe)
    recipe = on_devices.recipe
    config = recipe.config
    closest, lacking, keys = _arguments(recipe, version)
    is_script = recipe.workload.script is not None
    trial = promised(asked, on_devices.unsupported())
    code_keys = _keys_of_code(recipe, keys, version)
    files = {
        FILE: trainer_code(recipe, code_keys, version=version, trial=trial),
        **({} if is_script else training_script(recipe)),
        ARGUMENTS_FILE: json.dumps(keys, indent=2) + "\n",
        MODEL_FILE: json.dumps(model_keys(closest), indent=2) + "\n",
        **promise_file(asked, OF_TRAINER),
    }
    if launch.is_needed(config):
        files[launch.FILE] = launch.launcher(recipe)
    notes = (*_notes(recipe, version, lacking), *note(recipe))
    return Export(
        files=files,
        command=_IN_A_SCRIPT if is_script else _start(recipe),
        unsupported=on_devices.unsupported(),
        notes=notes,
    )


def arguments_export(recipe: Recipe, version: str) -> Export:
    """Returns what the arguments and a model's dtype do for a script, without code of autotune."""
    on_devices = _closest(recipe)
    recipe = on_devices.recipe
    closest, lacking, keys = _arguments(recipe, version)
    on_devices.reasons |= lacking
    on_devices.lacks({"sequence_length": (None, "your script cuts the sequences")})
    files = {ARGUMENTS_FILE: json.dumps({**keys, "dtype": model_keys(closest)["dtype"]})}
    if launch.is_needed(recipe.config):
        files[launch.FILE] = launch.launcher(recipe)
    unsupported = on_devices.unsupported()
    return Export(files=files, command=_start(recipe), unsupported=unsupported, notes=note(recipe))


def _arguments(
    recipe: Recipe, version: str
) -> tuple[TrainingConfig, dict[str, Reason], dict[str, Any]]:
    """Returns what TrainingArguments do of a recipe, why not all of it, and their keys."""
    closest, lacking = closest_config(recipe, has_every_n_layers=version != "4.57")
    lacking |= reasons_in(_BEYOND_JSON, recipe.config)
    keys = training_keys(recipe, closest, new_names=version == "5.23")
    return closest, lacking, {**keys, **_device_keys(recipe, version)}


def _start(recipe: Recipe) -> str:
    if recipe.devices == 1:
        return "python train.py"
    options = torchrun(recipe, f"--standalone --nproc-per-node {recipe.devices}")
    return f"torchrun {options} train.py"


def _closest(recipe: Recipe) -> Closest:
    """Returns the closest recipe that Trainer can share out among devices."""
    closest = Closest(recipe, "Trainer", {**WITH_KERNELS, "adapter_targets": OF_EXPERTS})
    if recipe.device_type == "cpu":
        closest.use_torch("DeepSpeed of transformers needs a GPU")
    closest.leave_out_zero1()
    fit_accelerate(closest, has_groups=False)
    config = closest.config
    if config.engine == "torch" and not divides_weights(config):
        closest.change("gradient_reduction", "fp32", "Trainer has no key for it")
    if closest.recipe.devices > 1 and config.optimizer_fusion == "backward":
        why = "accelerate, which it trains with, replaces the weights after the optimizer is made"
        closest.change("optimizer_fusion", "none", why)
    if config.kernels == "liger":
        why = "Trainer puts Liger's activations in the place of whole feed-forward parts"
        closest.change("adapter_kernels", "none", why)
        closest.change("feed_forward", "whole", why)
    if closest.recipe.is_fp16_on_cpu:
        closest.lacks({"precision": ("fp32", FP16_ON_CPU)})
    return closest


def _device_keys(recipe: Recipe, version: str) -> dict[str, Any]:
    """Returns the keys on what devices share out among them."""
    config = recipe.config
    if config.engine == "deepspeed":
        return {"deepspeed": automatic(recipe)}
    if divides_weights(config):
        fsdp: bool | str = True
        if version == "4.57":  # it has no key for the host
            fsdp = "full_shard auto_wrap"
            fsdp += " offload" if config.offload == "all" else ""
        return {
            "fsdp": fsdp,
            "fsdp_config": {"version": 2, **fsdp_keys(config, offload="cpu_offload")},
        }
    if recipe.devices > 1:
        return {"ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False}
    return {}


_IN_A_SCRIPT = """\
# in your script, whose model and data autotune does not know:
from autotune_trainer import AutotuneTrainer, training_arguments  # first
AutotuneTrainer(model=model, args=training_arguments("output"), train_dataset=data).train()"""


_BEYOND_JSON: Table = {
    "adapter": dict.fromkeys(("lora", "dora"), ("none", "it has no key")),
    "loss": {"chunked": ("full", "it has no key")},
    "activation_offload": {"cpu": ("none", "it has no key")},
    "offload": {"frozen": ("none", "it has no key")},
}
"""What the JSON files lack beside that."""


def _keys_of_code(recipe: Recipe, keys: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Returns `keys` without those of settings that the code of autotune_trainer.py makes."""
    config = recipe.config
    has_key = config.checkpointing in ("block", "every-2", "every-4") and version != "4.57"
    # With compiled blocks transformers would recompute outside the compiled code. With adapters it
    # would compute the gradient of the embeddings' output, which nothing needs.
    by_keys = has_key and config.compile != "block" and config.adapter == "none"
    checkpointing = checkpointing_keys(
        config.checkpointing if by_keys else "none", new_names=version == "5.23"
    )
    in_code = ("torch_compile_", "gradient_check", "activation_check")
    remaining = {
        name: value
        for name, value in keys.items()
        if name not in _IN_CODE and not name.startswith(in_code)
    }
    # The code makes the trial's optimizer, so its learning rate is not that of the closest one.
    return {
        **remaining,
        "learning_rate": recipe.workload.learning_rate_of(config.optimizer, config.adapter),
        **checkpointing,
    }


def _notes(recipe: Recipe, version: str, lacking: Mapping[str, Reason]) -> list[str]:
    config = recipe.config
    settings = recipe.settings()
    listed = [
        f"{setting} {settings[setting]} ({instead} instead)"
        for setting, (instead, _) in lacking.items()
        if setting not in DEPENDENT_FIELDS["adapter"]  # none of an adapter's is there without it
    ]
    if recipe.workload.script is None:
        listed.append(f"sequence_length {recipe.workload.sequence_length} (cut by your script)")
    lacks = "; ".join([", ".join(listed), *KEY_NOTES] if listed else KEY_NOTES)
    notes = [f"{ARGUMENTS_FILE} and {MODEL_FILE} alone lack: {lacks}"]
    if launch.is_needed(config):
        notes.append(
            f"with {ARGUMENTS_FILE} alone, start your script with `python {launch.FILE} "
            f"train.py`, which makes the settings of the process; {FILE} makes them itself"
        )
    return [*notes, *_requirements(recipe, version)]


def _requirements(recipe: Recipe, version: str) -> list[str]:
    config, workload = recipe.config, recipe.workload
    notes = user_script_note(workload)
    notes += text_notes(workload, says_tokenizer=says_tokenizer(workload))
    if version != "4.57" and config.checkpointing in ("every-2", "every-4"):
        notes.append(
            "every_n_layers needs transformers 5.16 or newer: older versions silently checkpoint "
            "every layer"
        )
    notes += packages_note(config)
    if config.attention in ("flash", "cudnn"):
        notes.append(
            f"batches must not contain attention_mask: attention {config.attention} takes no mask"
        )
    if config.optimizer_fusion == "backward":
        notes.append(
            "optimizer_fusion backward is for one device without accumulation; the logged norm of "
            "the gradients is 0"
        )
    if config.loss == "chunked":
        notes.append(
            "loss chunked returns no logits where there are labels: evaluate with "
            "prediction_loss_only=True"
        )
    if config.optimizer == "adafactor-fixed-rate" and workload.steps > LONGEST_ADAFACTOR_STEPS:
        notes.append(
            f"optim adafactor in {ARGUMENTS_FILE} has no largest beta2: after step "
            f"{LONGEST_ADAFACTOR_STEPS:,} its update differs from the trial's"
        )
    return notes


TARGET = Target(
    title="transformers Trainer",
    versions=("5", "5.23", "4.57"),
    checked_with="transformers 5.23.0, and 4.57.6 by hand",
    write=write,
)
