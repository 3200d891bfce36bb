"""Accelerate: `accelerate_config.yaml`, a launcher if needed, and lines for the user's script.

Accelerate prepares the model, optimizer and loader of a script, so most of a configuration is lines
of that script; each refusal quotes the line. The file decides mixed precision, compilation and how
devices share out the training.
Keys: accelerate 1.15.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from autotune.exporters import launch
from autotune.exporters.adapters import left_to_script
from autotune.exporters.bundle import shipped_files
from autotune.exporters.deepspeed_config import AUTO_FILE, automatic, json_text
from autotune.exporters.devices import Closest, divides_weights, fit_accelerate, fsdp_keys
from autotune.exporters.export import Export, Target
from autotune.exporters.reasons import MADE_BY_CLASS, WITH_MODES, Reason, Table, reasons_in
from autotune.exporters.recipe import Recipe
from autotune.exporters.script_lines import (
    COPY_THE_LOSS,
    SAVE_ON_CPU,
    SAVES_ALL,
    bf16_weights_line,
    blocks_line,
    model_and_data_note,
    optimizer_arguments,
    optimizer_line,
    write_schedule,
)
from autotune.exporters.several_nodes import FIRST_NODE, PORT, note
from autotune.exporters.yaml_text import yaml_text
from autotune.spec.config import TrainingConfig

FILE = "accelerate_config.yaml"
ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
"""There is no key for it. The environment variable overrides what the script specifies."""

_MIXED = {"bf16-mixed": "bf16", "fp16-mixed": "fp16", "fp8": "bf16", "int8-mixed": "bf16"}


def write(recipe: Recipe, version: str) -> Export:
    closest = _closest(recipe)
    closest.lacks(_lacking_techniques(closest.recipe))
    closest.lacks(_lacking_workload(closest.recipe))
    recipe, unsupported = closest.recipe, closest.unsupported()
    files = launch_files(recipe)
    if launch.is_needed(recipe.config):
        files[launch.FILE] = launch.launcher(recipe)
    files |= shipped_files(entry.why for entry in unsupported)
    return Export(
        files=files,
        command=_command(recipe),
        unsupported=unsupported,
        notes=(*_notes(recipe), *machines_note(recipe)),
    )


def _closest(recipe: Recipe) -> Closest:
    """Returns the closest recipe that accelerate and lines of a script can express."""
    closest = Closest(recipe, "accelerate", {**MADE_BY_CLASS, **WITH_MODES})
    if recipe.device_type == "cpu":
        closest.use_torch(_ON_A_CPU)
        closest.use_one_device(_ON_A_CPU)
        closest.leave_out_offload(_ON_A_CPU)
    fit_accelerate(closest, has_groups=True)
    return closest


_ON_A_CPU = "accelerate launch starts a single process on a CPU"


def launch_files(recipe: Recipe) -> dict[str, str]:
    """Returns the files that `accelerate launch` reads."""
    heading = f"# {recipe.origin}: {recipe.config.describe()}.\n"
    files = {FILE: heading + yaml_text(_settings(recipe))}
    if recipe.config.engine == "deepspeed":
        files[AUTO_FILE] = json_text(automatic(recipe))
    return files


def sharing_files(recipe: Recipe) -> dict[str, str]:
    """Returns the files that `accelerate launch` reads to share out a training, and nothing else.

    They are for a trainer with keys of its own for what accelerate would otherwise do again.
    """
    config = dataclasses.replace(
        recipe.config, compile="none", memory_budget=1.0, checkpointing="none"
    )
    return launch_files(dataclasses.replace(recipe, config=config))


def module_start(
    recipe: Recipe, module: str, *, trial: Mapping[str, Any] | None = None
) -> tuple[dict[str, str], str]:
    """Returns the files and the command that run a trainer's `module` on the recipe's devices.

    `module` has its arguments behind it. The settings of the process are made by the launcher,
    which also compares the training with `trial`.
    """
    files: dict[str, str] = {}
    start = "python"
    if is_shared(recipe):
        files |= sharing_files(recipe)
        start = f"accelerate launch --config_file {FILE}"
    if launch.is_needed(recipe.config) or trial is not None:
        files[launch.FILE] = launch.launcher(recipe, trial)
        start += f" {launch.FILE}"
    return files, f"{start} -m {module}"


def is_shared(recipe: Recipe) -> bool:
    """Returns whether a training needs `accelerate launch`: several devices, or DeepSpeed."""
    return recipe.devices > 1 or recipe.config.engine == "deepspeed"


def _command(recipe: Recipe) -> str:
    started = f"{launch.FILE} train.py" if launch.is_needed(recipe.config) else "train.py"
    accumulation = recipe.accumulation_steps
    environment = f"{ACCUMULATION}={accumulation} " if accumulation > 1 else ""
    return f"{environment}accelerate launch --config_file {FILE} {started}"


def _settings(recipe: Recipe) -> dict[str, object]:
    settings: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _distributed_type(recipe),
        "num_processes": recipe.devices,
        "num_machines": recipe.nodes,
        "machine_rank": 0,
        **_meeting(recipe),
        "use_cpu": recipe.device_type == "cpu",
        "debug": False,
        "mixed_precision": _mixed_precision(recipe),
        **_sharing(recipe),
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


def _meeting(recipe: Recipe) -> dict[str, object]:
    """Returns where the processes of several nodes meet."""
    if recipe.nodes == 1:
        return {}
    return {"main_process_ip": FIRST_NODE, "main_process_port": PORT, "same_network": True}


def machines_note(recipe: Recipe) -> tuple[str, ...]:
    """Returns the note on the file that each of several nodes has."""
    return note(recipe, f" in {FILE}, and machine_rank 1, 2, ... there on the others")


def _distributed_type(recipe: Recipe) -> str:
    if recipe.config.engine == "deepspeed":
        return "DEEPSPEED"
    if divides_weights(recipe.config):
        return "FSDP"
    return "MULTI_GPU" if recipe.devices > 1 else "NO"


def _sharing(recipe: Recipe) -> dict[str, object]:
    """Returns the sections on what devices share out among them."""
    config = recipe.config
    if config.engine == "deepspeed":
        section = {"deepspeed_config_file": AUTO_FILE, "zero3_init_flag": False}
        return {"deepspeed_config": section}
    if not divides_weights(config):
        return {}
    keys = fsdp_keys(config, offload="offload_params")
    keys["version"] = 2
    keys["activation_checkpointing"] = config.checkpointing == "block"
    sections: dict[str, object] = {
        "fsdp_config": {f"fsdp_{name}": value for name, value in keys.items()}
    }
    if config.sharding == "hsdp":
        sections["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": recipe.replicas // config.sharding_group,
            "parallelism_config_dp_shard_size": config.sharding_group,
            "parallelism_config_tp_size": 1,
        }
    return sections


def _mixed_precision(recipe: Recipe) -> str:
    # DeepSpeed's file has autocast; here it would stand for 16-bit weights with a float32 copy.
    if recipe.is_fp16_on_cpu or recipe.config.engine == "deepspeed":
        return "no"
    return _MIXED.get(recipe.config.precision, "no")


def _compiles(config: TrainingConfig) -> bool:
    return config.compile != "none" and not _script_compiles_blocks(config)


def _script_compiles_blocks(config: TrainingConfig) -> bool:
    """Returns whether the script, not accelerate, must compile the blocks.

    Regional compilation needs blocks of one class: if some are wrapped, it compiles the whole
    model as one graph. It would also compile a segment as one graph, where trials compile the
    blocks inside it.
    """
    return config.compile == "block" and config.checkpointing in ("every-4", "every-2", "sqrt")


_LACKING: Table = {
    "precision": {
        "bf16-true": (
            None,
            "the script sets the model's dtype: write {bf16_weights} before the optimizer",
        ),
        "bf16-stochastic": (
            None,
            "the script makes weights and optimizer: {bf16_weights} gives bf16-true, which rounds "
            "updates to nearest; the pytorch export rounds them stochastically",
        ),
        "fp8": (
            "bf16-mixed",
            "accelerate's fp8 leaves out the first linear layer, which trials convert: write "
            "{blocks} before accelerator.prepare",
        ),
        "int8-mixed": (
            "bf16-mixed",
            "accelerate has no products in int8: write {blocks} before accelerator.prepare",
        ),
    },
    "loss": {"chunked": (None, COPY_THE_LOSS)},
    "activation_offload": {
        "cpu": (
            None,
            f"accelerate has it for FSDP only: {SAVE_ON_CPU} around the forward pass, {SAVES_ALL}",
        )
    },
    "optimizer_fusion": {
        "backward": (
            None,
            "accelerate steps after backward: call optimizer.step in each parameter's "
            "register_post_accumulate_grad_hook, as the pytorch export does",
        )
    },
}


def _lacking_techniques(recipe: Recipe) -> dict[str, Reason]:
    config = recipe.config
    line = blocks_line(config, compiled=_script_compiles_blocks(config))
    reasons = reasons_in(_LACKING, config, blocks=line, bf16_weights=bf16_weights_line(config))
    if recipe.is_fp16_on_cpu:
        reasons["precision"] = (
            "fp32",
            "accelerate silently ignores fp16 on a CPU: use bf16-mixed",
        )
    elif config.precision == "fp32" and _compiles(config) and recipe.device_type == "cuda":
        reasons["precision"] = (
            "tf32",
            "accelerate turns TF32 on when it compiles without mixed precision: write "
            "torch.backends.cuda.matmul.allow_tf32 = False after Accelerator()",
        )
    by_fsdp = divides_weights(config) and config.checkpointing == "block"
    if config.checkpointing != "none" and not by_fsdp:
        reasons["checkpointing"] = (
            None,
            "accelerate has it for FSDP only, and for all blocks: write "
            f"{line} before accelerator.prepare",
        )
    if _script_compiles_blocks(config):
        reasons["compile"] = (
            None,
            "accelerate would compile the whole model, or each segment, as one graph, because not "
            f"all blocks are of one class: write {line} before accelerator.prepare",
        )
    if config.engine == "torch":
        reasons |= _lacking_devices(recipe)
    reasons |= left_to_script(config, recipe.workload, before="accelerator.prepare")
    return {**_in_the_script(recipe), **reasons}


def _in_the_script(recipe: Recipe) -> dict[str, Reason]:
    """Returns the techniques that the script has in any case."""
    arguments = optimizer_arguments(recipe)
    of_fusion = recipe.optimizer.flags(recipe.config.optimizer_fusion)
    flags = ", ".join(f"{name}={value}" for name, value in of_fusion.items())
    return {
        "optimizer": (None, f"the script makes the optimizer: write {optimizer_line(recipe)}"),
        "optimizer_fusion": (
            None,
            f"it is part of that line: {flags or 'this optimizer has no flags for it'}",
        ),
        "learning_rate": (None, f"it is part of the optimizer's line: lr={arguments['lr']}"),
        "weight_decay": (None, "it is part of the optimizer's line"),
        "micro_batch_size": (
            None,
            "the script sets the batch size: write torch.utils.data.DataLoader(..., "
            f"batch_size={recipe.config.micro_batch_size})",
        ),
    }


def _lacking_devices(recipe: Recipe) -> dict[str, Reason]:
    config = recipe.config
    reasons: dict[str, Reason] = {}
    if config.sharding == "zero1":
        reasons["sharding"] = (
            None,
            "the script makes the optimizer, which shares out its state: write "
            f"{optimizer_line(recipe)}",
        )
    if config.gradient_reduction == "bf16" and not divides_weights(config):
        reasons["gradient_reduction"] = (
            None,
            "the script makes the accelerator: write accelerate.Accelerator(kwargs_handlers="
            "[accelerate.DistributedDataParallelKwargs(comm_hook="
            "accelerate.utils.DDPCommunicationHookType.BF16)])",
        )
    return reasons


def _lacking_workload(recipe: Recipe) -> dict[str, Reason]:
    workload = recipe.workload
    on_each = f" on each of {recipe.devices} devices" if recipe.devices > 1 else ""
    reasons: dict[str, Reason] = {
        "steps": (
            None,
            f"the script has the loop: end it after {workload.steps} optimizer steps",
        ),
        "global_batch": (
            None,
            f"the script sets the batch size: use {recipe.config.micro_batch_size} sequences in "
            "with accelerator.accumulate(model):, and the command makes one step of "
            f"{recipe.accumulation_steps} of these{on_each}",
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
    if recipe.devices > 1:
        schedule += (
            ", and step it where accelerator.sync_gradients is true: after accelerator.prepare it "
            f"would make {recipe.devices} steps for one"
        )
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
    if divides_weights(config):
        notes.append(
            "For a model that is not one of transformers, name the class of its blocks in "
            "fsdp_transformer_layer_cls_to_wrap."
        )
    if config.compile == "block" and _compiles(config):
        notes.append(
            "Regional compilation compiles each block of a torch.nn.ModuleList, as trials do, and "
            "also every other part of the model, such as embedding and head, separately."
        )
    return tuple(notes)


TARGET = Target(title="Accelerate", versions=("1",), checked_with="accelerate 1.15.0", write=write)
