"""PyTorch by itself: a script that trains with the configuration and needs no autotune.

With it come the configuration as a file for people's own loops, and a launcher for scripts that
stay as they are. A study of somebody's own script has a script already: it gets the file and the
launcher.
"""

import json
import shlex
from pathlib import PurePath
from typing import Any

from autotune.exporters import launch
from autotune.exporters.export import Export, Refusal, Target
from autotune.exporters.pytorch import script
from autotune.exporters.pytorch.models import MODEL_CONFIG_FILE
from autotune.exporters.recipe import Recipe
from autotune.spec.model_file import with_layers
from autotune.spec.user_code import is_function_reference
from autotune.spec.workload import STANDARD_LIBRARY_TEXT, Workload
from autotune.units import format_size

CONFIG_FILE = "autotune_config.json"


def write(recipe: Recipe, version: str) -> Export:
    """Expresses everything, but what a script of one's own decides."""
    if recipe.workload.script is not None:
        return _for_a_script(recipe)
    files = {
        script.FILE: script.script(recipe),
        CONFIG_FILE: config_text(recipe),
        **_launcher(recipe),
    }
    if recipe.workload.model_config is not None:
        settings = with_layers(recipe.workload.model_config, recipe.workload.layers)
        settings.pop("auto_map", None)  # names code outside transformers, which is not run
        files[MODEL_CONFIG_FILE] = json.dumps(settings, indent=2) + "\n"
    return Export(files=files, command=f"python {script.FILE}", notes=tuple(_notes(recipe)))


def config_text(recipe: Recipe) -> str:
    """What `autotune.load_config` reads: the configuration, and where it comes from."""
    content: dict[str, Any] = {
        "origin": recipe.origin,
        "config": recipe.config.to_dict(),
        "measured": {
            "device_type": recipe.device_type,
            "peak_memory_bytes": recipe.peak_memory_bytes,
            "device_bytes": recipe.device_bytes,
            "tokens_per_second": recipe.tokens_per_second,
            "perplexity": recipe.perplexity,
        },
        "workload": recipe.workload.to_dict(),
    }
    return json.dumps(content, indent=2) + "\n"


def _launcher(recipe: Recipe) -> dict[str, str]:
    return {launch.FILE: launch.launcher(recipe)} if launch.is_needed(recipe.config) else {}


def _for_a_script(recipe: Recipe) -> Export:
    own = recipe.workload.script
    assert own is not None
    # autotune.apply comes too late for the allocator, which reads its setting once.
    launched = f"{launch.FILE} " if recipe.config.allocator != "default" else ""
    return Export(
        files={CONFIG_FILE: config_text(recipe), **_launcher(recipe)},
        command=f"AUTOTUNE_CONFIG={CONFIG_FILE} python {launched}{shlex.quote(own)}",
        refusals=tuple(_left_to_the_script(recipe)),
        notes=(
            f"{own} calls autotune.apply, which applies {CONFIG_FILE} where that variable names it; where the script "
            "reads files of its own, start it in the folder it was searched in and name these files by their paths",
        ),
    )


def _left_to_the_script(recipe: Recipe) -> list[Refusal]:
    """What the search has not seen has no value; the rest it has said to the script, which may heed it."""
    own = (
        "learning_rate",
        "weight_decay",
        "schedule",
        "learning_rate_warmup_steps",
        "sequence_length",
    )
    known = {name: recipe.settings()[name] for name in ("steps", "seed", "global_batch")}
    return [
        Refusal(
            setting=name,
            value=known.get(name),
            instead=None,
            why=f"{recipe.workload.script} decides it",
        )
        for name in (*own, "gradient_clipping", *known)
    ]


def _notes(recipe: Recipe) -> list[str]:
    config, workload = recipe.config, recipe.workload
    notes = []
    packages = [
        name
        for name, is_used in (
            ("transformers", workload.model_config is not None),
            ("torchao", config.precision == "fp8" or config.optimizer == "adamw-8bit"),
            ("datasets", not _is_plain_text(workload)),
            ("tokenizers", workload.tokenizer != "bytes"),
        )
        if is_used
    ]
    needed = ", ".join(["torch", "numpy", *packages])
    notes.append(f"{script.FILE} needs {needed}, and no autotune")
    if recipe.device_bytes is not None and recipe.device_type == "cuda":
        notes.append(f"the device must have {format_size(recipe.device_bytes)}, as measured")
    if workload.streaming:
        notes.append(
            f"{script.FILE} reads no more text than {workload.steps} steps use, as the study did"
        )
    if is_function_reference(workload.model) and not PurePath(workload.model).is_absolute():
        notes.append(f"run it where {workload.model} is found, as the search was")
    load = f"autotune.load_config('{CONFIG_FILE}')"
    notes.append(
        f"your own loop: model, optimizer = autotune.apply(model, optimizer, config={load})"
    )
    if launch.is_needed(config):
        notes.append(
            f"your own script as it is: python {launch.FILE} your_script.py, for what only code can set"
        )
    return notes


def _is_plain_text(workload: Workload) -> bool:
    return workload.dataset == STANDARD_LIBRARY_TEXT or workload.dataset.endswith(
        (".txt", ".md", ".rst")
    )


TARGET = Target(
    title="PyTorch, a script that needs no autotune",
    versions=("2",),
    checked_with="torch 2.13.0",
    write=write,
)
