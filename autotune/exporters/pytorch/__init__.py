"""PyTorch without a trainer: a script that trains with the configuration and needs no autotune.

The export also has the configuration as a file, for the user's training loop, and a launcher for
scripts that are not changed. A study of the user's script gets only the file and the launcher.
"""

import dataclasses
import json
import shlex
from pathlib import PurePath
from typing import Any

from autotune.exporters import adapters, launch
from autotune.exporters.devices import Closest, divides_weights
from autotune.exporters.export import Export, Target, Unsupported
from autotune.exporters.promise import promised
from autotune.exporters.pytorch import script
from autotune.exporters.pytorch.models import MODEL_CONFIG_FILE
from autotune.exporters.reasons import WITH_EXPERTS, WITH_KERNELS
from autotune.exporters.recipe import DECIDED_BY_SCRIPT, Recipe
from autotune.exporters.several_nodes import note
from autotune.spec.config import QUANTIZED_WEIGHTS
from autotune.spec.model_file import with_layers
from autotune.spec.user_code import is_function_reference
from autotune.spec.workload import STANDARD_LIBRARY_TEXT, Workload
from autotune.units import format_size

CONFIG_FILE = "autotune_config.json"


def write(recipe: Recipe, version: str) -> Export:
    """Returns the export, which expresses all settings but those that a user's script decides."""
    if recipe.workload.script is not None:
        return _for_a_script(recipe)
    trial = recipe
    closest = _closest(trial)
    recipe = closest.recipe
    files = {
        script.FILE: script.script(recipe, promised(trial, closest.unsupported())),
        CONFIG_FILE: config_text(trial),
        **_launcher(recipe),
    }
    if recipe.workload.model_config is not None:
        settings = with_layers(recipe.workload.model_config, recipe.workload.layers)
        settings.pop("auto_map", None)  # it names code outside transformers, which is not run
        settings.pop("quantization_config", None)  # the trial did not use it
        files[MODEL_CONFIG_FILE] = json.dumps(settings, indent=2) + "\n"
    return Export(
        files=files,
        command=f"{script.start(recipe)} {script.FILE}",
        unsupported=closest.unsupported(),
        notes=(*_notes(recipe), *note(recipe, ", in a folder that all of them see")),
    )


def _closest(recipe: Recipe) -> Closest:
    """Returns the closest recipe that the script can train with."""
    closest = Closest(recipe, "the script", {**WITH_KERNELS, **WITH_EXPERTS})
    closest.use_torch("the script needs no DeepSpeed: export to deepspeed for it")
    closest.leave_out_tensor_parallel(
        "the script has whole matrices on every device: export to torchtitan for split ones"
    )
    if closest.config.offload != "frozen":
        closest.leave_out_offload("the script has everything on the device but frozen weights")
    is_nf4 = QUANTIZED_WEIGHTS.get(closest.config.base_weights) == "nf4"
    if is_nf4 and divides_weights(closest.config):
        why = "the script has codes and scales of nf4 in one tensor, which FSDP2 cannot divide"
        closest.change("sharding", "ddp", f"{why}: export to a trainer with accelerate")
        closest.change("sharding_group", 1, "ddp has no groups")
    if closest.reasons:  # it takes another amount of memory than the trial
        unknown: dict[str, Any] = {"peak_memory_bytes": None, "peak_memory_bytes_by_rank": ()}
        closest.recipe = dataclasses.replace(closest.recipe, **unknown)
    return closest


def config_text(recipe: Recipe) -> str:
    """Returns the file that `autotune.load_config` reads: the configuration and its origin."""
    content: dict[str, Any] = {
        "origin": recipe.origin,
        "config": recipe.config.to_dict(),
        "measured": {
            "device_type": recipe.device_type,
            "peak_memory_bytes": recipe.peak_memory_bytes,
            "device_bytes": recipe.device_bytes,
            "tokens_per_second": recipe.tokens_per_second,
            "perplexity": recipe.perplexity,
            **promised(recipe),
        },
        "workload": recipe.workload.to_dict(),
    }
    return json.dumps(content, indent=2) + "\n"


def _launcher(recipe: Recipe) -> dict[str, str]:
    return {launch.FILE: launch.launcher(recipe)} if launch.is_needed(recipe.config) else {}


def _for_a_script(recipe: Recipe) -> Export:
    """Returns the export for the user's script, which finds its own files by relative paths."""
    user_script = recipe.workload.script
    assert user_script is not None
    # The allocator reads its setting once, before autotune.apply could make it.
    launcher = [] if recipe.config.allocator == "default" else [str(recipe.folder / launch.FILE)]
    if recipe.workload.is_injected:  # it makes that setting, too
        launcher = ["-m", "autotune.run"]
    python = ["torchrun", "--standalone"] if recipe.workload.one_rank else ["python"]
    command = shlex.join([*python, *launcher, *recipe.workload.script_command()])
    command = f"AUTOTUNE_CONFIG={shlex.quote(str(recipe.folder / CONFIG_FILE))} {command}"
    notes = [
        f"{user_script} calls autotune.apply, which applies the {CONFIG_FILE} that the variable "
        "names"
    ]
    if recipe.workload.is_injected:
        notes = [
            f"{user_script} has no line of autotune: autotune.run gives its Trainer the callback "
            f"that applies the {CONFIG_FILE} that the variable names; with callbacks="
            "[autotune.TrainerCallback(args)] in the script, leave `-m autotune.run` out"
        ]
    if recipe.search_folder is None:
        notes.append(
            f"the study's {user_script} is not found from here, or was edited: start it in the "
            "folder of the search"
        )
    else:
        command = f"cd {shlex.quote(str(recipe.search_folder))} && {command}"
    return Export(
        files={
            CONFIG_FILE: config_text(recipe),
            **({} if recipe.workload.is_injected else _launcher(recipe)),
        },
        command=command,
        is_for_any_folder=recipe.search_folder is not None,
        unsupported=tuple(_decided_by_script(recipe)),
        notes=tuple(notes),
    )


def _decided_by_script(recipe: Recipe) -> list[Unsupported]:
    """Returns the settings that the user's script decides.

    The search knows values only of those that it passed to the script, which may use them.
    """
    known = {name: recipe.settings()[name] for name in ("steps", "seed", "global_batch")}
    why = f"{recipe.workload.script} decides it"
    return [
        Unsupported(setting=name, value=known.get(name), instead=None, why=why)
        for name in (*DECIDED_BY_SCRIPT, *known)
    ]


def _notes(recipe: Recipe) -> list[str]:
    config, workload = recipe.config, recipe.workload
    packages = ["torch", "numpy"]
    if workload.model_config is not None or workload.has_conversations:
        packages.append("transformers")
    packages += adapters.packages(config)
    if not _is_plain_text(workload):
        packages.append("datasets")
    if workload.tokenizer != "bytes":
        packages.append("tokenizers")
    notes = [f"{script.FILE} needs {', '.join(packages)}, and no autotune"]
    if recipe.device_bytes is not None and recipe.device_type == "cuda":
        notes.append(f"it needs {format_size(recipe.device_bytes)} of device memory, as measured")
    if workload.streaming:
        notes.append(
            f"{script.FILE} reads no more text than {workload.steps} steps use, as the study did"
        )
    if is_function_reference(workload.model) and not PurePath(workload.model).is_absolute():
        notes.append(f"run it in the folder of the search, where {workload.model} is found")
    if recipe.devices == 1:
        load = f"autotune.load_config('{CONFIG_FILE}')"
        notes.append(
            "in your training loop: model, optimizer = autotune.apply(model, optimizer, "
            f"config={load})"
        )
    if launch.is_needed(config):
        start = script.start(recipe)
        notes.append(
            f"with your script unchanged: {start} {launch.FILE} your_script.py, which makes the "
            "settings of the process"
        )
    return notes


def _is_plain_text(workload: Workload) -> bool:
    return workload.dataset == STANDARD_LIBRARY_TEXT or workload.dataset.endswith(
        (".txt", ".md", ".rst")
    )


TARGET = Target(
    title="PyTorch",
    versions=("2",),
    checked_with="torch 2.13.0",
    write=write,
)
