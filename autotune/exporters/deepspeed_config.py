"""DeepSpeed: a file for `deepspeed.initialize` and one for transformers and accelerate.

`ds_config.json` is the former, `ds_config_auto.json` the latter. Sharding is a stage of ZeRO: 0 is
data-parallel training. Mixed precision is `torch_autocast`: the `bf16` and `fp16` sections of
DeepSpeed hold 16-bit weights and a float32 copy of them, which is a different training.
Keys: deepspeed 0.19.
"""

import json

from autotune.exporters import launch
from autotune.exporters.adapters import left_to_script
from autotune.exporters.bundle import shipped_files
from autotune.exporters.devices import Closest, fit_deepspeed, zero_settings
from autotune.exporters.export import Export, Target
from autotune.exporters.reasons import KNOWN, MADE_BY_CLASS, Reason, Table, reasons_in
from autotune.exporters.recipe import Recipe
from autotune.exporters.script_lines import (
    COPY_THE_LOSS,
    SAVE_ON_CPU,
    SAVES_ALL,
    bf16_weights_line,
    blocks_line,
    model_and_data_note,
    optimizer_arguments,
    optimizer_class,
    optimizer_line,
    write_schedule,
)
from autotune.spec.config import TrainingConfig

FILE = "ds_config.json"
AUTO_FILE = "ds_config_auto.json"

_AUTOCAST = {
    "bf16-mixed": "bfloat16",
    "fp16-mixed": "float16",
    "fp8": "bfloat16",
    "int8-mixed": "bfloat16",
}


def write(recipe: Recipe, version: str) -> Export:
    closest = _closest(recipe)
    closest.lacks(_lacking_techniques(closest.recipe))
    closest.lacks(_lacking_workload(closest.recipe))
    recipe, unsupported = closest.recipe, closest.unsupported()
    files = {FILE: json_text(_numbers(recipe)), AUTO_FILE: json_text(automatic(recipe))}
    if launch.is_needed(recipe.config):
        files[launch.FILE] = launch.launcher(recipe)
    files |= shipped_files(entry.why for entry in unsupported)
    return Export(
        files=files,
        command=_command(recipe),
        unsupported=unsupported,
        notes=(*_notes(recipe), *_nodes_note(recipe)),
    )


def _closest(recipe: Recipe) -> Closest:
    """Returns the closest recipe that DeepSpeed can train with."""
    has = {**MADE_BY_CLASS, "gradient_accumulation_dtype": ("fp32",)}
    closest = Closest(recipe, "DeepSpeed", has)
    fit_deepspeed(closest)
    if closest.recipe.devices > 1 or closest.config.offload != "none":
        why = "it is DeepSpeed that shares out here, with buffers of its own for communication"
        closest.change("engine", "deepspeed", why)
    return closest


def json_text(settings: dict[str, object]) -> str:
    return json.dumps(settings, indent=2) + "\n"


def _command(recipe: Recipe) -> str:
    devices = f"--num_gpus {recipe.devices} " if recipe.devices > 1 else ""
    if recipe.nodes > 1:
        devices = f"--hostfile hostfile --num_nodes {recipe.nodes} "
        devices += f"--num_gpus {recipe.devices_on_each_node} "
    if not launch.is_needed(recipe.config):
        return f"deepspeed {devices}train.py --deepspeed --deepspeed_config {FILE}"
    # Without the flag the first argument would be the rank, where the launcher expects a script.
    return (
        f"deepspeed {devices}--no_local_rank {launch.FILE} train.py --deepspeed "
        f"--deepspeed_config {FILE}"
    )


def _nodes_note(recipe: Recipe) -> tuple[str, ...]:
    if recipe.nodes == 1:
        return ()
    slots = recipe.devices_on_each_node
    return (
        f"the trial ran on {recipe.nodes} nodes with {slots} devices each: run the command on the "
        f"first; hostfile has a line for each of them, such as worker-1 slots={slots}",
    )


def _origin(recipe: Recipe) -> dict[str, object]:
    # DeepSpeed and transformers ignore sections that they do not know.
    return {"autotune": {"origin": recipe.origin, "configuration": recipe.config.describe()}}


def _numbers(recipe: Recipe) -> dict[str, object]:
    by_script = _is_made_by_script(recipe)
    settings = {
        **_origin(recipe),
        **engine_settings(recipe),
        **(client_settings(recipe.config) if by_script else {}),
    }
    if not by_script:
        settings["optimizer"] = _optimizer(recipe)
        if scheduler := _scheduler(recipe):
            settings["scheduler"] = scheduler
    return settings


def _is_made_by_script(recipe: Recipe) -> bool:
    """Returns whether the script makes the optimizer: DeepSpeed has those of torch and its own."""
    return recipe.optimizer.module != "torch.optim"


def engine_settings(recipe: Recipe) -> dict[str, object]:
    """Returns what the engine does, in trials too; optimizer and schedule are not in it."""
    return {
        "train_micro_batch_size_per_gpu": recipe.config.micro_batch_size,
        "gradient_accumulation_steps": recipe.accumulation_steps,
        "gradient_clipping": recipe.workload.gradient_clipping or 0.0,
        **zero_settings(recipe.config),
        **_autocast(recipe.config),
    }


def automatic(recipe: Recipe) -> dict[str, object]:
    """Returns the settings without optimizer and schedule, which would replace the trainer's."""
    return {
        **_origin(recipe),
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        **zero_settings(recipe.config),
        **client_settings(recipe.config),
        **_autocast(recipe.config),
    }


def client_settings(config: TrainingConfig) -> dict[str, object]:
    """Returns what lets ZeRO use an optimizer that DeepSpeed did not make."""
    settings: dict[str, object] = {}
    if config.sharding not in ("none", "ddp") or config.offload != "none":
        settings["zero_allow_untested_optimizer"] = True
    if config.offload != "none":
        settings["zero_force_ds_cpu_optimizer"] = False
    return settings


def _autocast(config: TrainingConfig) -> dict[str, object]:
    if config.precision not in _AUTOCAST:
        return {}
    section: dict[str, object] = {"enabled": True, "dtype": _AUTOCAST[config.precision]}
    if config.sharding != "none" and config.gradient_reduction == "fp32":
        # Otherwise ZeRO sends weights and gradients of linear layers in 16 bits.
        section["lower_precision_safe_modules"] = []
    return {"torch_autocast": section}


def _optimizer(recipe: Recipe) -> dict[str, object]:
    arguments = optimizer_arguments(recipe)
    if _rises_by_scheduler(recipe):
        # The scheduler sets the rate after each step, so the first step has the optimizer's rate.
        arguments["lr"] = _rate(recipe) / recipe.workload.learning_rate_warmup_steps
    if recipe.config.optimizer == "adamw":
        # Otherwise DeepSpeed would use its own kernel, which it compiles at the first step.
        arguments["torch_adam"] = True
    return {"type": optimizer_class(recipe).rpartition(".")[2], "params": arguments}


def _rises_by_scheduler(recipe: Recipe) -> bool:
    workload = recipe.workload
    return workload.schedule == "constant" and workload.learning_rate_warmup_steps > 1


def _rate(recipe: Recipe) -> float:
    return recipe.workload.learning_rate_of(recipe.config.optimizer, recipe.config.adapter)


def _scheduler(recipe: Recipe) -> dict[str, object] | None:
    """Returns a WarmupLR whose step s, counted from 0, has (s + 1) / warm-up of the rate.

    With its defaults the first two steps would have a rate of zero.
    """
    if not _rises_by_scheduler(recipe):
        return None
    workload = recipe.workload
    rate = _rate(recipe)
    warmup = workload.learning_rate_warmup_steps
    return {
        "type": "WarmupLR",
        "params": {
            # It rises over at least two steps; a warm-up of two has reached the rate by then.
            "warmup_min_lr": rate if warmup == 2 else rate / warmup,
            "warmup_max_lr": rate,
            "warmup_num_steps": max(2, warmup - 1),
            "warmup_type": "linear",
            "last_batch_iteration": 0,
        },
    }


_CAST = (
    "DeepSpeed's bf16 section holds a float32 copy of the weights: write {bf16_weights} before "
    "deepspeed.initialize"
)
_LACKING: Table = {
    "precision": {
        "bf16-true": (None, _CAST),
        "bf16-stochastic": (
            None,
            f"{_CAST}, which gives bf16-true and rounds updates to nearest; the pytorch export "
            "rounds them stochastically",
        ),
        "fp8": ("bf16-mixed", "DeepSpeed has no fp8: write {blocks} before deepspeed.initialize"),
        "int8-mixed": (
            "bf16-mixed",
            "DeepSpeed has no products in int8: write {blocks} before deepspeed.initialize",
        ),
    },
    "gradient_accumulation_dtype": {
        "fp32": (
            "weights",
            "data_types.grad_accum_dtype is for the bf16 section, which holds a float32 copy of "
            "the weights: use the pytorch export",
        ),
    },
    "checkpointing": dict.fromkeys(
        KNOWN["checkpointing"],
        (
            None,
            "the section activation_checkpointing affects only models that call "
            "deepspeed.checkpointing: write {blocks} before deepspeed.initialize",
        ),
    ),
    "compile": {
        "block": (
            None,
            "there is no key for it: write {blocks} before deepspeed.initialize",
        ),
        "model": (
            None,
            'there is no key for it: write engine.compile(compile_kwargs={{"dynamic": False}}) '
            "after deepspeed.initialize",
        ),
    },
    "loss": {"chunked": (None, COPY_THE_LOSS)},
    "activation_offload": {
        "cpu": (None, f"there is no key for it: {SAVE_ON_CPU} around the forward pass, {SAVES_ALL}")
    },
    "optimizer_fusion": {
        "backward": ("none", "DeepSpeed's engine steps after backward: use the pytorch export")
    },
}


def _lacking_techniques(recipe: Recipe) -> dict[str, Reason]:
    config = recipe.config
    reasons = reasons_in(
        _LACKING,
        config,
        blocks=blocks_line(config, compiled=config.compile == "block"),
        bf16_weights=bf16_weights_line(config),
    )
    reasons |= left_to_script(config, recipe.workload, before="deepspeed.initialize")
    if _is_made_by_script(recipe):
        why = (
            f"DeepSpeed cannot make it: write optimizer={optimizer_line(recipe)} in "
            "deepspeed.initialize"
        )
        reasons |= dict.fromkeys(("optimizer", "learning_rate", "weight_decay"), (None, why))
    return reasons


def _lacking_workload(recipe: Recipe) -> dict[str, Reason]:
    workload = recipe.workload
    reasons: dict[str, Reason] = {
        "steps": (
            None,
            f"the script has the loop: end it when engine.global_steps is {workload.steps}",
        ),
        "sequence_length": (
            None,
            f"the script reads the data: cut it to {workload.sequence_length} tokens",
        ),
        "seed": (None, f"write torch.manual_seed({workload.seed}) before the model is made"),
    }
    instruction = write_schedule(workload, before="lr_scheduler=lambda optimizer: ")
    instruction += " in deepspeed.initialize"
    if workload.schedule == "cosine":
        reasons["schedule"] = (
            "constant",
            f"WarmupCosineLR has a rate of 0 in the first step and another phase: {instruction}",
        )
    if workload.learning_rate_warmup_steps > 1 and not _has_scheduler(recipe):
        reasons["learning_rate_warmup_steps"] = (1, f"it is part of the schedule: {instruction}")
    return reasons


def _has_scheduler(recipe: Recipe) -> bool:
    """Returns whether the file contains a scheduler."""
    return not _is_made_by_script(recipe) and _rises_by_scheduler(recipe)


def _notes(recipe: Recipe) -> tuple[str, ...]:
    notes = [
        model_and_data_note(recipe),
        "train.py is your script, which calls deepspeed.initialize, engine.backward(loss) and "
        "engine.step().",
        "Before each update DeepSpeed copies all gradients into one buffer to reduce them, even on "
        "one device. There engine.enable_backward_allreduce = False after deepspeed.initialize "
        "saves that memory.",
        f"{AUTO_FILE} is for transformers (TrainingArguments.deepspeed) and accelerate "
        "(deepspeed_config_file), which fill in its auto values. Leave bf16 and fp16 of "
        "transformers or accelerate off: they would turn those of DeepSpeed on.",
    ]
    if recipe.config.offload != "none" and recipe.config.optimizer == "adamw":
        notes.append(
            "torch_adam in the file makes torch's AdamW update on the host: without it DeepSpeed "
            "compiles a kernel of its own at the first step, which is faster."
        )
    if _has_scheduler(recipe):
        notes.append(
            "The optimizer's lr is that of the first step only. To change the rate, change "
            "warmup_max_lr, with lr and warmup_min_lr in proportion."
        )
    return tuple(notes)


TARGET = Target(title="DeepSpeed", versions=("0.19",), checked_with="deepspeed 0.19.8", write=write)
