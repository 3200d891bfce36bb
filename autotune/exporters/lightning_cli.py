"""Lightning: `lightning.yaml` for LightningCLI, and a callback for what its Trainer has no key for.

Model and data are classes of the user's own, which the script gives to LightningCLI; `optimizer` in
the file takes the place of their `configure_optimizers`. Keys: lightning 2.6.
"""

import yaml

from autotune.exporters.export import Export, Refusal, Target
from autotune.exporters.recipe import SMALLEST_RATE, Recipe
from autotune.exporters.script_lines import model_and_data, optimizer_arguments, optimizer_class
from autotune.exporters.shipped import ADAFACTOR, BLOCKS, CALLBACK, shipped_text

FILE = "lightning.yaml"

_PRECISIONS = {
    "fp32": "32-true",
    "tf32": "32-true",
    "bf16-mixed": "bf16-mixed",
    "bf16-true": "bf16-true",
    "bf16-stochastic": "bf16-true",
    "fp16-mixed": "16-mixed",
    "fp8": "bf16-mixed",
}


def write(recipe: Recipe, version: str) -> Export:
    files = {
        FILE: _heading(recipe) + yaml.safe_dump(_settings(recipe), sort_keys=False),
        CALLBACK: shipped_text(CALLBACK),
        BLOCKS: shipped_text(BLOCKS),
    }
    if recipe.config.optimizer == "adafactor-fixed-rate":
        files[ADAFACTOR] = shipped_text(ADAFACTOR)
    return Export(
        files=files, command=_command(recipe), refusals=_refusals(recipe), notes=_notes(recipe)
    )


def _heading(recipe: Recipe) -> str:
    return f"# {recipe.origin}: {recipe.config.describe()}.\n"


def _command(recipe: Recipe) -> str:
    # The allocator reads it once, before a callback could set it.
    expandable = recipe.config.allocator == "expandable"
    environment = "PYTORCH_ALLOC_CONF=expandable_segments:True " if expandable else ""
    return f"{environment}python main.py fit -c {FILE}"


def _settings(recipe: Recipe) -> dict[str, object]:
    workload = recipe.workload
    return {
        "seed_everything": workload.seed,
        "trainer": {
            "accelerator": "cpu" if recipe.device_type == "cpu" else "gpu",
            "devices": 1,
            "precision": _precision(recipe),
            "max_steps": workload.steps,
            "accumulate_grad_batches": recipe.accumulation_steps,
            "gradient_clip_val": None if _clips_in_callback(recipe) else workload.gradient_clipping,
            "gradient_clip_algorithm": "norm",
            "callbacks": [
                {"class_path": "autotune_callback.AutotuneCallback", "init_args": _callback(recipe)}
            ],
        },
        "optimizer": {
            "class_path": optimizer_class(recipe),
            "init_args": optimizer_arguments(recipe),
        },
    }


def _precision(recipe: Recipe) -> str:
    return "32-true" if recipe.is_fp16_on_cpu else _PRECISIONS[recipe.config.precision]


def _clips_in_callback(recipe: Recipe) -> bool:
    """Lightning refuses to clip for a fused optimizer in mixed precision, whether it has a scaler or not."""
    return recipe.config.optimizer_fusion == "kernel" and _precision(recipe).endswith("-mixed")


def _callback(recipe: Recipe) -> dict[str, object]:
    config, workload = recipe.config, recipe.workload
    return {
        "learning_rate": workload.learning_rate_of(config.optimizer),
        "schedule": workload.schedule,
        "warmup_steps": workload.learning_rate_warmup_steps,
        "total_steps": workload.steps,
        "smallest_rate": SMALLEST_RATE,
        "checkpointing": config.checkpointing,
        "compile": config.compile,
        "fp8": config.precision == "fp8",
        "memory_budget": config.memory_budget,
        "attention": config.attention,
        "float32_matmul_precision": "high" if config.precision == "tf32" else "highest",
        "gradient_clipping": workload.gradient_clipping if _clips_in_callback(recipe) else None,
    }


def _refusals(recipe: Recipe) -> tuple[Refusal, ...]:
    values = recipe.settings()
    whys = {**_why_not_techniques(recipe), **_why_not_workload(recipe)}
    return tuple(
        Refusal(setting=setting, value=values[setting], instead=instead, why=why)
        for setting, (instead, why) in whys.items()
    )


def _why_not_techniques(recipe: Recipe) -> dict[str, tuple[str | None, str]]:
    """{setting: (what the files do instead, why)}"""
    config = recipe.config
    whys: dict[str, tuple[str | None, str]] = {}
    if recipe.is_fp16_on_cpu:
        whys["precision"] = (
            "fp32",
            "Lightning makes bfloat16 of 16-mixed on a CPU: use bf16-mixed",
        )
    if config.precision == "bf16-stochastic":
        whys["precision"] = (
            "bf16-true",
            "an update is rounded to nearest: the pytorch export rounds it stochastically",
        )
    whys["micro_batch_size"] = (
        None,
        "the batch is your LightningDataModule's: write torch.utils.data.DataLoader(..., "
        f"batch_size={config.micro_batch_size})",
    )
    if config.optimizer_fusion == "backward":
        whys["optimizer_fusion"] = (
            "none",
            "Lightning steps after backward: use the pytorch export",
        )
    if config.loss == "chunked":
        whys["loss"] = (
            None,
            "the loss is your training_step's: the pytorch export has one in chunks to copy",
        )
    if config.activation_offload != "none":
        whys["activation_offload"] = (
            None,
            "Lightning has no key for it: write with torch.autograd.graph.save_on_cpu(pin_memory=True): in "
            "training_step, which also moves what is small and the weights that products keep",
        )
    return whys


def _why_not_workload(recipe: Recipe) -> dict[str, tuple[str | None, str]]:
    workload = recipe.workload
    return {
        "global_batch": (
            None,
            f"a step is {recipe.accumulation_steps} of your LightningDataModule's batches: with "
            f"{recipe.config.micro_batch_size} sequences in each it is {workload.global_batch}",
        ),
        "sequence_length": (
            None,
            f"the data is your LightningDataModule's: cut it to {workload.sequence_length} tokens",
        ),
    }


def _notes(recipe: Recipe) -> tuple[str, ...]:
    casts = "bf16-true casts buffers as well, such as frequencies of positions, which a trial leaves in float32."
    return (
        model_and_data(recipe),
        *([casts] if _precision(recipe) == "bf16-true" else []),
        "main.py is a script of your own: lightning.pytorch.cli.LightningCLI(YourModule, YourDataModule).",
        f"Needs lightning and jsonargparse[signatures]; keep the Python files beside main.py with {FILE}.",
        "The optimizer in the file takes the place of your module's configure_optimizers, and the callback sets its "
        "rate: leave schedulers out.",
        f"max_steps and total_steps are those of the trial: set both for a longer training ({recipe.workload.steps} "
        "steps were run).",
    )


TARGET = Target(title="Lightning", versions=("2",), checked_with="lightning 2.6.6", write=write)
