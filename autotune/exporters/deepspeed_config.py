"""DeepSpeed: `ds_config.json` for `deepspeed.initialize`, `ds_config_auto.json` for transformers and accelerate.

Both at ZeRO stage 0: a trial runs on one device. Mixed precision is `torch_autocast`: DeepSpeed's
own `bf16` and `fp16` sections keep 16-bit weights and a float32 copy of them, which is another
training. Keys: deepspeed 0.19.
"""

import json

from autotune.exporters import launch
from autotune.exporters.export import Export, Refusal, Target
from autotune.exporters.recipe import Recipe
from autotune.exporters.script_lines import (
    BF16_WEIGHTS,
    blocks_line,
    model_and_data,
    optimizer_arguments,
    optimizer_class,
    optimizer_line,
    write_schedule,
)
from autotune.exporters.shipped import shipped_files
from autotune.spec.config import TrainingConfig

FILE = "ds_config.json"
AUTO_FILE = "ds_config_auto.json"

_AUTOCAST = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16", "fp8": "bfloat16"}
_OWN_OPTIMIZERS = ("adamw-8bit", "adafactor-fixed-rate")
"""DeepSpeed makes those of torch.optim by their names and its own; others are given to
`initialize`."""


def write(recipe: Recipe, version: str) -> Export:
    refusals = _refusals(recipe)
    files = {FILE: _text(_numbers(recipe)), AUTO_FILE: _text(_automatic(recipe))}
    if launch.is_needed(recipe.config):
        files[launch.FILE] = launch.launcher(recipe)
    files |= shipped_files(refusal.why for refusal in refusals)
    return Export(
        files=files, command=_command(recipe.config), refusals=refusals, notes=_notes(recipe)
    )


def _text(settings: dict[str, object]) -> str:
    return json.dumps(settings, indent=2) + "\n"


def _command(config: TrainingConfig) -> str:
    if not launch.is_needed(config):
        return f"deepspeed train.py --deepspeed --deepspeed_config {FILE}"
    # Without the flag its first argument would be the rank, where ours expects a script.
    return f"deepspeed --no_local_rank {launch.FILE} train.py --deepspeed --deepspeed_config {FILE}"


def _origin(recipe: Recipe) -> dict[str, object]:
    # DeepSpeed and transformers pass over sections that they do not know.
    return {"autotune": {"origin": recipe.origin, "configuration": recipe.config.describe()}}


def _numbers(recipe: Recipe) -> dict[str, object]:
    settings = {
        **_origin(recipe),
        "train_micro_batch_size_per_gpu": recipe.config.micro_batch_size,
        "gradient_accumulation_steps": recipe.accumulation_steps,
        "gradient_clipping": recipe.workload.gradient_clipping or 0.0,
        "zero_optimization": {"stage": 0},
        **_autocast(recipe.config),
    }
    if recipe.config.optimizer not in _OWN_OPTIMIZERS:
        settings["optimizer"] = _optimizer(recipe)
        if scheduler := _scheduler(recipe):
            settings["scheduler"] = scheduler
    return settings


def _automatic(recipe: Recipe) -> dict[str, object]:
    """Optimizer and schedule are left to the trainer: DeepSpeed's would take their place."""
    return {
        **_origin(recipe),
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 0},
        **_autocast(recipe.config),
    }


def _autocast(config: TrainingConfig) -> dict[str, object]:
    if config.precision not in _AUTOCAST:
        return {}
    return {"torch_autocast": {"enabled": True, "dtype": _AUTOCAST[config.precision]}}


def _optimizer(recipe: Recipe) -> dict[str, object]:
    arguments = optimizer_arguments(recipe)
    if _rises_by_scheduler(recipe):
        # The scheduler is asked after a step, never before the first: that one has the optimizer's
        # own rate.
        rate = recipe.workload.learning_rate_of(recipe.config.optimizer)
        arguments["lr"] = rate / recipe.workload.learning_rate_warmup_steps
    if recipe.config.optimizer == "adamw":
        arguments["torch_adam"] = True  # else DeepSpeed's own kernel, compiled at the first step
    return {"type": optimizer_class(recipe).rpartition(".")[2], "params": arguments}


def _rises_by_scheduler(recipe: Recipe) -> bool:
    workload = recipe.workload
    return workload.schedule == "constant" and workload.learning_rate_warmup_steps > 1


def _scheduler(recipe: Recipe) -> dict[str, object] | None:
    """WarmupLR so set that step s, from 0, has (s + 1) / warm-up of the rate; by itself it begins with two at zero."""
    if not _rises_by_scheduler(recipe):
        return None
    workload = recipe.workload
    rate = workload.learning_rate_of(recipe.config.optimizer)
    warmup = workload.learning_rate_warmup_steps
    return {
        "type": "WarmupLR",
        "params": {
            # It rises over two steps at least: with a warm-up of two there is nothing left to rise.
            "warmup_min_lr": rate if warmup == 2 else rate / warmup,
            "warmup_max_lr": rate,
            "warmup_num_steps": max(2, warmup - 1),
            "warmup_type": "linear",
            "last_batch_iteration": 0,
        },
    }


def _refusals(recipe: Recipe) -> tuple[Refusal, ...]:
    values = recipe.settings()
    whys = {**_why_not_techniques(recipe), **_why_not_workload(recipe)}
    return tuple(
        Refusal(setting=setting, value=values[setting], instead=instead, why=why)
        for setting, (instead, why) in whys.items()
    )


def _why_not_techniques(recipe: Recipe) -> dict[str, tuple[object, str]]:
    """{setting: (what the files do instead, why)}"""
    config = recipe.config
    line = blocks_line(config, compiled=config.compile == "block")
    whys: dict[str, tuple[object, str]] = {}
    if reason := _why_not_precision(config, line):
        whys["precision"] = reason
    if config.checkpointing != "none":
        whys["checkpointing"] = (
            None,
            "the section activation_checkpointing sets what a model's own calls of deepspeed.checkpointing do and "
            f"turns nothing on: write {line} before deepspeed.initialize",
        )
    if config.compile == "block":
        whys["compile"] = (
            None,
            f"there is no key for it: write {line} before deepspeed.initialize",
        )
    if config.compile == "model":
        whys["compile"] = (
            None,
            'there is no key for it: write engine.compile(compile_kwargs={"dynamic": False}) after '
            "deepspeed.initialize",
        )
    if config.loss == "chunked":
        whys["loss"] = (
            None,
            "the loss is the script's own: the pytorch export has one in chunks to copy",
        )
    if config.activation_offload != "none":
        whys["activation_offload"] = (
            None,
            "there is no key for it: write with torch.autograd.graph.save_on_cpu(pin_memory=True): around the forward "
            "pass, which also moves what is small and the weights that products keep",
        )
    return whys | _why_not_optimizer(recipe)


def _why_not_precision(config: TrainingConfig, line: str) -> tuple[object, str] | None:
    own = (
        f"DeepSpeed's bf16 section keeps a float32 copy of the weights: write {BF16_WEIGHTS} before"
    )
    if config.precision == "bf16-true":
        return None, f"{own} deepspeed.initialize"
    if config.precision == "bf16-stochastic":
        return None, (
            f"{own} deepspeed.initialize, which gives bf16-true and rounds updates to nearest; the pytorch export "
            "rounds them stochastically"
        )
    if config.precision == "fp8":
        return "bf16-mixed", f"DeepSpeed has no fp8: write {line} before deepspeed.initialize"
    return None


def _why_not_optimizer(recipe: Recipe) -> dict[str, tuple[object, str]]:
    config, whys = recipe.config, dict[str, tuple[object, str]]()
    if config.optimizer in _OWN_OPTIMIZERS:
        why = f"DeepSpeed cannot make it: write optimizer={optimizer_line(recipe)} in deepspeed.initialize"
        whys |= dict.fromkeys(("optimizer", "learning_rate", "weight_decay"), (None, why))
    if config.optimizer_fusion == "backward":
        whys["optimizer_fusion"] = (
            "none",
            "DeepSpeed's engine steps after backward: use the pytorch export",
        )
    return whys


def _why_not_workload(recipe: Recipe) -> dict[str, tuple[object, str]]:
    workload = recipe.workload
    whys: dict[str, tuple[object, str]] = {
        "steps": (
            None,
            f"the loop is the script's own: end it when engine.global_steps is {workload.steps}",
        ),
        "sequence_length": (
            None,
            f"the data is the script's own: cut it to {workload.sequence_length} tokens",
        ),
        "seed": (None, f"write torch.manual_seed({workload.seed}) before the model is made"),
    }
    say = f"{write_schedule(workload, before='lr_scheduler=lambda optimizer: ')} in deepspeed.initialize"
    if workload.schedule == "cosine":
        whys["schedule"] = (
            "constant",
            f"WarmupCosineLR has a rate of 0 in the first step and another phase: {say}",
        )
    if workload.learning_rate_warmup_steps > 1 and not (
        _rises_by_scheduler(recipe) and recipe.config.optimizer not in _OWN_OPTIMIZERS
    ):
        whys["learning_rate_warmup_steps"] = (1, f"it is part of the schedule: {say}")
    return whys


def _notes(recipe: Recipe) -> tuple[str, ...]:
    notes = [
        model_and_data(recipe),
        "train.py is a script of your own that calls deepspeed.initialize, engine.backward(loss) and engine.step().",
        "Before each update DeepSpeed copies all gradients into one buffer to reduce them, also on one device, where "
        "engine.enable_backward_allreduce = False after deepspeed.initialize saves that memory.",
        f"{AUTO_FILE} is for transformers (TrainingArguments.deepspeed) and accelerate (deepspeed_config_file), which "
        "fill in its auto values; leave their own bf16 and fp16 off, which would turn DeepSpeed's on.",
    ]
    if _rises_by_scheduler(recipe) and recipe.config.optimizer not in _OWN_OPTIMIZERS:
        notes.append(
            "The optimizer's lr is that of the first step alone; the rate to change is warmup_max_lr, with lr and "
            "warmup_min_lr in proportion."
        )
    return tuple(notes)


TARGET = Target(title="DeepSpeed", versions=("0.19",), checked_with="deepspeed 0.19.8", write=write)
