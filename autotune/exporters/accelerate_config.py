"""Accelerate: `accelerate_config.yaml`, a launcher if needed, and lines for the user's script.

Accelerate prepares the model, optimizer and loader of a script, so most of a configuration is lines
of that script; each refusal quotes the line. The file decides mixed precision and compilation.
Keys: accelerate 1.15.
"""

from autotune.exporters import launch
from autotune.exporters.adapters import left_to_script
from autotune.exporters.export import Export, Target, Unsupported
from autotune.exporters.recipe import Recipe
from autotune.exporters.script_lines import (
    bf16_weights_line,
    blocks_line,
    model_and_data_note,
    optimizer_arguments,
    optimizer_flags,
    optimizer_line,
    write_schedule,
)
from autotune.exporters.shipped import shipped_files
from autotune.exporters.yaml_text import yaml_text
from autotune.spec.config import TrainingConfig

FILE = "accelerate_config.yaml"
ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
"""There is no key for it. The environment variable overrides what the script specifies."""

_MIXED = {"bf16-mixed": "bf16", "fp16-mixed": "fp16", "fp8": "bf16"}


def write(recipe: Recipe, version: str) -> Export:
    unsupported = _unsupported(recipe)
    files = {FILE: _heading(recipe) + yaml_text(_settings(recipe))}
    if launch.is_needed(recipe.config):
        files[launch.FILE] = launch.launcher(recipe)
    files |= shipped_files(entry.why for entry in unsupported)
    return Export(
        files=files, command=_command(recipe), unsupported=unsupported, notes=_notes(recipe)
    )


def _heading(recipe: Recipe) -> str:
    return f"# {recipe.origin}: {recipe.config.describe()}.\n"


def _command(recipe: Recipe) -> str:
    started = f"{launch.FILE} train.py" if launch.is_needed(recipe.config) else "train.py"
    accumulation = recipe.accumulation_steps
    environment = f"{ACCUMULATION}={accumulation} " if accumulation > 1 else ""
    return f"{environment}accelerate launch --config_file {FILE} {started}"


def _settings(recipe: Recipe) -> dict[str, object]:
    settings: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "num_processes": 1,
        "num_machines": 1,
        "machine_rank": 0,
        "use_cpu": recipe.device_type == "cpu",
        "debug": False,
        "mixed_precision": _mixed_precision(recipe),
    }
    if _compiles(recipe.config):
        settings["dynamo_config"] = {
            "dynamo_backend": "INDUCTOR",
            "dynamo_mode": "default",
            "dynamo_use_dynamic": False,
            "dynamo_use_fullgraph": False,
            "dynamo_use_regional_compilation": recipe.config.compile == "block",
        }
    return settings


def _mixed_precision(recipe: Recipe) -> str:
    if recipe.is_fp16_on_cpu:
        return "no"
    return _MIXED.get(recipe.config.precision, "no")


def _compiles(config: TrainingConfig) -> bool:
    return config.compile != "none" and not _script_compiles_blocks(config)


def _script_compiles_blocks(config: TrainingConfig) -> bool:
    """Return whether the script, not accelerate, must compile the blocks.

    Regional compilation needs blocks of one class: if some are wrapped, it compiles the whole
    model as one graph. It would also compile a segment as one graph, where trials compile the
    blocks inside it.
    """
    return config.compile == "block" and config.checkpointing in ("every-4", "every-2", "sqrt")


def _unsupported(recipe: Recipe) -> tuple[Unsupported, ...]:
    values = recipe.settings()
    reasons = {**_unsupported_techniques(recipe), **_unsupported_workload(recipe)}
    return tuple(
        Unsupported(setting=setting, value=values[setting], instead=instead, why=why)
        for setting, (instead, why) in reasons.items()
    )


def _unsupported_techniques(recipe: Recipe) -> dict[str, tuple[str | None, str]]:
    """Return {setting: (what the files do instead, why)}."""
    config = recipe.config
    line = blocks_line(config, compiled=_script_compiles_blocks(config))
    reasons: dict[str, tuple[str | None, str]] = {}
    if reason := _unsupported_precision(recipe, line):
        reasons["precision"] = reason
    reasons |= left_to_script(config, before="accelerator.prepare")
    reasons |= _unsupported_optimizer(recipe)
    reasons["micro_batch_size"] = (
        None,
        "the script sets the batch size: write torch.utils.data.DataLoader(..., "
        f"batch_size={config.micro_batch_size})",
    )
    if config.checkpointing != "none":
        reasons["checkpointing"] = (
            None,
            f"accelerate has it for FSDP only: write {line} before accelerator.prepare",
        )
    if _script_compiles_blocks(config):
        reasons["compile"] = (
            None,
            "accelerate would compile the whole model, or each segment, as one graph, because not "
            f"all blocks are of one class: write {line} before accelerator.prepare",
        )
    if config.loss == "chunked":
        reasons["loss"] = (
            None,
            "the script computes the loss: copy the loss in chunks from the pytorch export",
        )
    if config.activation_offload != "none":
        reasons["activation_offload"] = (
            None,
            "accelerate has it for FSDP only: write with "
            "torch.autograd.graph.save_on_cpu(pin_memory=True): around the forward pass, which "
            "also moves small tensors and the weights that products save",
        )
    return reasons


def _unsupported_precision(recipe: Recipe, line: str) -> tuple[str | None, str] | None:
    config = recipe.config
    if recipe.is_fp16_on_cpu:
        return "fp32", "accelerate silently ignores fp16 on a CPU: use bf16-mixed"
    if config.precision == "fp32" and _compiles(config) and recipe.device_type == "cuda":
        return (
            "tf32",
            "accelerate turns TF32 on when it compiles without mixed precision: write "
            "torch.backends.cuda.matmul.allow_tf32 = False after Accelerator()",
        )
    if config.precision == "bf16-true":
        return (
            None,
            f"the script sets the model's dtype: write {bf16_weights_line(config)} before the "
            "optimizer",
        )
    if config.precision == "bf16-stochastic":
        return None, (
            f"the script makes weights and optimizer: {bf16_weights_line(config)} gives bf16-true, "
            "which rounds updates to nearest; the pytorch export rounds them stochastically"
        )
    if config.precision == "fp8":
        return "bf16-mixed", (
            "accelerate's fp8 leaves out the first linear layer, which trials convert: "
            f"write {line} before accelerator.prepare"
        )
    return None


def _unsupported_optimizer(recipe: Recipe) -> dict[str, tuple[str | None, str]]:
    arguments = optimizer_arguments(recipe)
    flags = ", ".join(f"{name}={value}" for name, value in optimizer_flags(recipe.config).items())
    reasons: dict[str, tuple[str | None, str]] = {
        "optimizer": (None, f"the script makes the optimizer: write {optimizer_line(recipe)}"),
        "optimizer_fusion": (
            None,
            f"it is part of that line: {flags or 'this optimizer has no flags for it'}",
        ),
        "learning_rate": (None, f"it is part of the optimizer's line: lr={arguments['lr']}"),
        "weight_decay": (None, "it is part of the optimizer's line"),
    }
    if recipe.config.optimizer_fusion == "backward":
        reasons["optimizer_fusion"] = (
            None,
            "accelerate steps after backward: call optimizer.step in each parameter's "
            "register_post_accumulate_grad_hook, as the pytorch export does",
        )
    return reasons


def _unsupported_workload(recipe: Recipe) -> dict[str, tuple[str | None, str]]:
    workload = recipe.workload
    reasons: dict[str, tuple[str | None, str]] = {
        "steps": (
            None,
            f"the script has the loop: end it after {workload.steps} optimizer steps",
        ),
        "global_batch": (
            None,
            f"the script sets the batch size: use {recipe.config.micro_batch_size} sequences in "
            "with accelerator.accumulate(model):, and the command makes one step of "
            f"{recipe.accumulation_steps} of these",
        ),
        "sequence_length": (
            None,
            f"the script reads the data: cut it to {workload.sequence_length} tokens",
        ),
        "seed": (
            None,
            f"write accelerate.utils.set_seed({workload.seed}) before the model is made",
        ),
    }
    schedule = f"the script makes the schedule: {write_schedule(workload)}"
    if workload.schedule != "constant":
        reasons["schedule"] = (None, schedule)
    if workload.learning_rate_warmup_steps > 1:
        reasons["learning_rate_warmup_steps"] = (None, schedule)
    if workload.gradient_clipping is not None:
        reasons["gradient_clipping"] = (
            None,
            "the script has the loop: write if accelerator.sync_gradients: "
            f"accelerator.clip_grad_norm_(model.parameters(), {workload.gradient_clipping}) before "
            "optimizer.step()",
        )
    return reasons


def _notes(recipe: Recipe) -> tuple[str, ...]:
    config = recipe.config
    notes = [
        model_and_data_note(recipe),
        "train.py is your script, which calls accelerator.prepare(model, optimizer, loader) and "
        "accelerator.backward(loss).",
    ]
    if recipe.accumulation_steps > 1:
        notes.append(
            f"{ACCUMULATION} has an effect if the loop runs inside accelerator.accumulate(model). "
            f"Accelerator(gradient_accumulation_steps={recipe.accumulation_steps}) in the script "
            "does the same."
        )
    if config.compile == "block" and _compiles(config):
        notes.append(
            "Regional compilation compiles each block of a torch.nn.ModuleList, as trials do, and "
            "also every other part of the model, such as embedding and head, separately."
        )
    return tuple(notes)


TARGET = Target(title="Accelerate", versions=("1",), checked_with="accelerate 1.15.0", write=write)
