"""Lightning: `lightning.yaml` for LightningCLI, and a callback for what its Trainer has no key for.

Model and data are the user's classes, which the script passes to LightningCLI; `optimizer` in the
file replaces their `configure_optimizers`. Several devices share out a training by a strategy of
Lightning; for FSDP2 the user's module shards itself, by a line that the export prints. Keys:
lightning 2.6.
"""

from typing import Any

from autotune.exporters.adapters import left_to_script
from autotune.exporters.bundle import BLOCKS, CALLBACK, shipped_files, shipped_text
from autotune.exporters.deepspeed_config import client_settings
from autotune.exporters.devices import (
    Closest,
    divides_weights,
    fit_deepspeed,
    is_resharded,
    zero_settings,
)
from autotune.exporters.export import Export, Target
from autotune.exporters.promise import OF_LIGHTNING, is_promised, promise_file, promised
from autotune.exporters.reasons import MADE_BY_CLASS, Reason, Table, reasons_in
from autotune.exporters.recipe import SMALLEST_RATE, Recipe
from autotune.exporters.script_lines import (
    SAVE_ON_CPU,
    SAVES_ALL,
    model_and_data_note,
    optimizer_arguments,
    optimizer_class,
)
from autotune.exporters.several_nodes import FIRST_NODE, PORT
from autotune.exporters.yaml_text import yaml_text
from autotune.spec.config import TrainingConfig
from autotune.spec.optimizers import OPTIMIZERS
from autotune.system.allocator_settings import assignments

FILE = "lightning.yaml"

_PRECISIONS = {
    "fp32": "32-true",
    "tf32": "32-true",
    "bf16-mixed": "bf16-mixed",
    "bf16-true": "bf16-true",
    "bf16-stochastic": "bf16-true",
    "fp16-mixed": "16-mixed",
    "fp8": "bf16-mixed",
    "int8-mixed": "bf16-mixed",
}


def write(recipe: Recipe, version: str) -> Export:
    asked = recipe
    closest = _closest(recipe)
    closest.lacks(_lacking_techniques(closest.recipe))
    closest.lacks(_lacking_workload(closest.recipe))
    recipe = closest.recipe
    heading = f"# {recipe.origin}: {recipe.config.describe()}.\n"
    settings = _settings(recipe)
    if is_promised(asked):
        settings["trainer"]["callbacks"].append(
            {
                "class_path": "autotune_lightning_promise.PromiseCallback",
                "init_args": {"trial": promised(asked, closest.unsupported())},
            }
        )
    files = {
        FILE: heading + yaml_text(settings),
        CALLBACK: shipped_text(CALLBACK),
        BLOCKS: shipped_text(BLOCKS),
        **shipped_files([optimizer_class(recipe)]),
        **promise_file(asked, OF_LIGHTNING),
    }
    command = f"python main.py fit -c {FILE}"
    if recipe.config.allocator == "expandable":
        # The allocator reads the variable once, before a callback could set it.
        command = f"{assignments(expandable=True)} {command}"
    return Export(
        files=files,
        command=command,
        unsupported=closest.unsupported(),
        notes=(*_notes(recipe), *_nodes_note(recipe)),
    )


def _closest(recipe: Recipe) -> Closest:
    """Returns the closest recipe that a strategy of Lightning can share out among devices."""
    closest = Closest(recipe, "Lightning", MADE_BY_CLASS)
    if recipe.device_type == "cpu":
        closest.use_torch("Lightning has DeepSpeed for GPUs only")
    config = closest.config
    if OPTIMIZERS[config.optimizer].of_matrices:
        why = "LightningCLI makes the optimizer of all parameters alike"
        closest.change("optimizer", "adamw", why)
    if config.engine == "deepspeed":
        fit_deepspeed(closest)
        if config.precision in _COPIES:
            closest.differs("precision", *_COPIES[config.precision])
        return closest
    closest.leave_out_tensor_parallel(
        "your module would have to split its matrices in configure_model: export to torchtitan"
    )
    closest.leave_out_offload("Lightning moves memory to the host with DeepSpeed only")
    if divides_weights(config) and config.precision == "fp16-mixed":
        why = "ModelParallelStrategy, which is for FSDP2, has no scaling of float16 gradients"
        closest.change("precision", "bf16-mixed", why)
    return closest


_WHY_A_COPY = "Lightning has DeepSpeed hold 16-bit weights and a float32 copy, without autocast"
_COPIES = {
    "bf16-mixed": ("bf16-true with a float32 copy", _WHY_A_COPY),
    "fp8": ("bf16-true with a float32 copy", _WHY_A_COPY),
    "int8-mixed": ("bf16-true with a float32 copy", _WHY_A_COPY),
    "bf16-true": ("bf16-true with a float32 copy", _WHY_A_COPY),
    "bf16-stochastic": ("bf16-true with a float32 copy", _WHY_A_COPY),
    "fp16-mixed": ("fp16 with a float32 copy", _WHY_A_COPY),
}
"""{precision: (what DeepSpeed does instead, why)}."""


def _settings(recipe: Recipe) -> dict[str, Any]:
    workload = recipe.workload
    return {
        "seed_everything": workload.seed,
        "trainer": {
            "accelerator": "cpu" if recipe.device_type == "cpu" else "gpu",
            "devices": recipe.devices_on_each_node,
            **({"num_nodes": recipe.nodes} if recipe.nodes > 1 else {}),
            **_strategy(recipe.config, devices=recipe.devices),
            "precision": _precision(recipe),
            "max_steps": workload.steps,
            "accumulate_grad_batches": recipe.accumulation_steps,
            "gradient_clip_val": None if _clips_in_callback(recipe) else workload.gradient_clipping,
            "gradient_clip_algorithm": "norm",
            "callbacks": [
                {"class_path": "autotune_callback.AutotuneCallback", "init_args": _callback(recipe)}
            ],
        },
        "optimizer": _optimizer(recipe),
    }


def _strategy(config: TrainingConfig, *, devices: int) -> dict[str, object]:
    """Returns the key on what devices share out among them; none where there is one."""
    name = "DDPStrategy"
    arguments: dict[str, object] = {"gradient_as_bucket_view": True, "broadcast_buffers": False}
    if config.engine == "deepspeed":
        name = "DeepSpeedStrategy"
        arguments = {"config": {**zero_settings(config), **client_settings(config)}}
    elif config.sharding == "none":
        return {}
    elif divides_weights(config):
        name = "ModelParallelStrategy"
        arguments = {"data_parallel_size": devices, "tensor_parallel_size": 1}
    elif config.gradient_reduction == "bf16":
        hooks = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
        arguments["ddp_comm_hook"] = f"{hooks}.bf16_compress_hook"
    path = f"lightning.pytorch.strategies.{name}"
    return {"strategy": {"class_path": path, "init_args": arguments}}


def _optimizer(recipe: Recipe) -> dict[str, object]:
    arguments = optimizer_arguments(recipe)
    if recipe.config.engine == "torch" and recipe.config.sharding == "zero1":
        return {
            "class_path": "torch.distributed.optim.ZeroRedundancyOptimizer",
            "init_args": {"optimizer_class": optimizer_class(recipe)},
            "dict_kwargs": arguments,
        }
    return {"class_path": optimizer_class(recipe), "init_args": arguments}


def _precision(recipe: Recipe) -> str:
    return "32-true" if recipe.is_fp16_on_cpu else _PRECISIONS[recipe.config.precision]


def _clips_in_callback(recipe: Recipe) -> bool:
    """Returns whether the callback must clip the gradients.

    Lightning raises an error for clipping with a fused optimizer in mixed precision, whether there
    is a scaler or not.
    """
    return recipe.config.optimizer_fusion == "kernel" and _precision(recipe).endswith("-mixed")


def _callback(recipe: Recipe) -> dict[str, object]:
    config, workload = recipe.config, recipe.workload
    return {
        "learning_rate": workload.learning_rate_of(config.optimizer, config.adapter),
        "schedule": workload.schedule,
        "warmup_steps": workload.learning_rate_warmup_steps,
        "total_steps": workload.steps,
        "smallest_rate": SMALLEST_RATE,
        "checkpointing": config.checkpointing,
        "compile": config.compile,
        "fp8": config.precision == "fp8",
        "int8": config.precision == "int8-mixed",
        "memory_budget": config.memory_budget,
        "attention": config.attention,
        "float32_matmul_precision": "high" if config.precision == "tf32" else "highest",
        "gradient_clipping": workload.gradient_clipping if _clips_in_callback(recipe) else None,
    }


_LACKING: Table = {
    "precision": {
        "bf16-stochastic": (
            "bf16-true",
            "updates are rounded to nearest: the pytorch export rounds them stochastically",
        )
    },
    "optimizer_fusion": {
        "backward": ("none", "Lightning steps after backward: use the pytorch export")
    },
    "loss": {
        "chunked": (
            None,
            "your training_step computes the loss: copy the loss in chunks from the pytorch export",
        )
    },
    "activation_offload": {
        "cpu": (
            None,
            f"Lightning has no key for it: {SAVE_ON_CPU} in training_step, {SAVES_ALL}",
        )
    },
}


def _lacking_techniques(recipe: Recipe) -> dict[str, Reason]:
    config = recipe.config
    reasons = reasons_in(_LACKING, config)
    if recipe.is_fp16_on_cpu:
        reasons["precision"] = (
            "fp32",
            "Lightning turns 16-mixed into bfloat16 on a CPU: use bf16-mixed",
        )
    reasons["micro_batch_size"] = (
        None,
        "your LightningDataModule sets the batch size: write torch.utils.data.DataLoader(..., "
        f"batch_size={config.micro_batch_size})",
    )
    reasons |= left_to_script(
        config, recipe.workload, before="the end of your module's configure_model"
    )
    if divides_weights(config):
        line = _sharding_line(recipe)
        reasons["sharding"] = (
            None,
            f"with ModelParallelStrategy your module shards itself: write {line} at the end of its "
            "configure_model",
        )
        part = (None, "it is part of the line that shards your module")
        if config.sharding == "hsdp":
            reasons["sharding_group"] = part
        if config.gradient_reduction != "fp32":
            reasons["gradient_reduction"] = part
    return reasons


def _sharding_line(recipe: Recipe) -> str:
    """Returns the call by which the user's module shares out its weights."""
    config = recipe.config
    arguments = ["self", f'device="{recipe.device_type}"']
    if config.sharding == "hsdp":
        arguments.append(f"group={config.sharding_group}")
    if not is_resharded(config):
        arguments.append("reshard_after_forward=False")
    if config.precision == "bf16-mixed":
        arguments.append("param_dtype=torch.bfloat16")
    if config.gradient_reduction == "bf16":
        arguments.append("reduce_dtype=torch.bfloat16")
    return f"autotune_blocks.shard_blocks({', '.join(arguments)})"


def _lacking_workload(recipe: Recipe) -> dict[str, Reason]:
    workload = recipe.workload
    on_each = f" on each of {recipe.devices} devices" if recipe.devices > 1 else ""
    return {
        "global_batch": (
            None,
            f"a step uses {recipe.accumulation_steps} batches of your LightningDataModule"
            f"{on_each}: with {recipe.config.micro_batch_size} sequences in each, the global batch "
            f"is {workload.global_batch}",
        ),
        "sequence_length": (
            None,
            f"your LightningDataModule reads the data: cut it to {workload.sequence_length} tokens",
        ),
    }


def _nodes_note(recipe: Recipe) -> tuple[str, ...]:
    if recipe.nodes == 1:
        return ()
    return (
        f"the trial ran on {recipe.nodes} nodes with {recipe.devices_on_each_node} devices each: "
        f"run the command on each of them with MASTER_ADDR={FIRST_NODE}, the address of the first, "
        f"MASTER_PORT={PORT}, and NODE_RANK=0, 1, ...; in a Slurm job srun is enough",
    )


def _notes(recipe: Recipe) -> tuple[str, ...]:
    notes = [model_and_data_note(recipe)]
    if _precision(recipe) == "bf16-true":
        notes.append(
            "bf16-true also casts buffers, such as the frequencies of positions, which a trial "
            "leaves in float32."
        )
    notes += [
        "main.py is your script: lightning.pytorch.cli.LightningCLI(YourModule, YourDataModule).",
        f"Needs lightning and jsonargparse[signatures]. Put the Python files and {FILE} next to "
        "main.py.",
        "The optimizer in the file replaces configure_optimizers of your module, and the callback "
        "sets its learning rate: use no scheduler.",
        "max_steps and total_steps are those of the trial "
        f"({recipe.workload.steps} steps): set both for a longer training.",
    ]
    return tuple(notes)


TARGET = Target(title="Lightning", versions=("2",), checked_with="lightning 2.6.6", write=write)
