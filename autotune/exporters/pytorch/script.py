"""The exported script as a whole: settings, techniques, training loop, model and data.

It needs only torch, numpy and the packages that read the text. The loop is that of
`autotune/training/step.py` and `autotune/training/trainer.py`, without measurements and without the
techniques that the configuration does not use. It consists of modules of `autotune/shipped/script`;
here are its settings and the functions that differ with the configuration.
"""

import textwrap
from collections.abc import Mapping
from typing import Any

from autotune.exporters import launch
from autotune.exporters.adapters import base_dtype, is_quantized
from autotune.exporters.bundle import Part, banner, code, joined, shipped
from autotune.exporters.devices import divides_weights
from autotune.exporters.promise import literal_lines
from autotune.exporters.pytorch.data import data_parts
from autotune.exporters.pytorch.devices import device_parts
from autotune.exporters.pytorch.models import model_parts
from autotune.exporters.pytorch.techniques import autocast_dtype, technique_parts
from autotune.exporters.recipe import Recipe, in_docstring
from autotune.exporters.several_nodes import torchrun
from autotune.spec.config import TrainingConfig
from autotune.units import format_size

FILE = "train.py"


def start(recipe: Recipe) -> str:
    """Returns what the command line begins with, before the name of the script."""
    if recipe.devices == 1:
        return "python"
    options = torchrun(recipe, f"--standalone --nproc-per-node {recipe.devices}")
    return f"torchrun {options}"


def script(recipe: Recipe, promise: Mapping[str, Any]) -> str:
    """Returns the text of the script, which compares itself with `promise`."""
    is_alone = recipe.devices == 1
    parts = [
        _settings(recipe, promise),
        banner("techniques"),
        *technique_parts(recipe),
        banner("training"),
        *([] if is_alone else device_parts(recipe)),
        _forward(recipe.config),
        shipped("script.one_device" if is_alone else "script.several_devices"),
        shipped("script.learning_rate"),
        banner("model"),
        *model_parts(recipe),
        shipped("token_loss"),
        banner("text"),
        *data_parts(recipe.workload),
        banner("peak memory"),
        _resident_tensors(recipe),
        shipped("peak_memory"),
        banner("promise"),
        shipped("promise"),
        banner("program"),
        shipped("script.program" if is_alone else "script.program_of_ranks"),
    ]
    return _header(recipe) + joined(parts)


def _header(recipe: Recipe) -> str:
    config, workload = recipe.config, recipe.workload
    measured = ""
    if recipe.peak_memory_bytes is not None:
        measured = f"\nMeasured: peak memory {format_size(recipe.peak_memory_bytes)}"
        if recipe.tokens_per_second is not None:
            measured += f", {recipe.tokens_per_second:,.0f} tokens/s"
        if recipe.perplexity is not None:
            measured += f", perplexity {recipe.perplexity:.4g}"
        measured += ".\n"
    environment = ""
    before_torch = launch.before_torch(config)
    if before_torch:
        environment = "\n".join(["import os", "", *before_torch, "", ""])
    about = f"{workload.describe()}, trained as in {recipe.origin}: {config.describe()}."
    return f'''"""{textwrap.fill(in_docstring(about), width=97, break_long_words=False)}
{measured}
{_usage(recipe)}

Written by autotune, which it does not need. The configuration is in `apply_techniques`, `Updater`,
`train_step` and the settings below.
"""

from __future__ import annotations

{environment}'''


def _usage(recipe: Recipe) -> str:
    if recipe.devices == 1:
        return f"""\
    python {FILE}                     # on the text of the workload
    python {FILE} --text my.txt       # on a text, jsonl, csv or parquet file, a folder,
                                        # or a name on the hub
    python {FILE} --steps 2000 --save model.pt"""
    return f"""\
    {start(recipe)} {FILE}

trains on the text of the workload, with `--text my.txt` on a text, jsonl, csv or parquet file, a
folder, or a name on the hub. `--steps 2000 --save model.pt` trains longer and saves the weights.
With another number of processes each has another part of the global batch, which stays the same."""


def _settings(recipe: Recipe, promise: Mapping[str, Any]) -> Part:
    config, workload = recipe.config, recipe.workload
    imports = ["from typing import Any", "import torch"]
    process = launch.with_torch(config)
    imports += [f"import {name}" for name in launch.CONFIG_MODULES if name in "".join(process)]
    lines = [*imports, *process]
    lines.append('DEVICE = "cuda" if torch.cuda.is_available() else "cpu"')
    settings: dict[str, object] = {
        "TEXT": workload.dataset,
        "SEQUENCE_LENGTH": workload.sequence_length,
        "VOCABULARY": workload.vocab_size,
        "GLOBAL_BATCH": workload.global_batch,
        "MICRO_BATCH": config.micro_batch_size,
        "STEPS": workload.steps,
        "EVALUATION_SEQUENCES": workload.evaluation_sequences,
        "LEARNING_RATE": workload.learning_rate_of(config.optimizer, config.adapter),
        "LEARNING_RATE_WARMUP_STEPS": workload.learning_rate_warmup_steps,
        "SCHEDULE": workload.schedule,
        "SEED": workload.seed,
        "IS_COMPILED": config.compile != "none",
    }
    if recipe.devices > 1:
        settings["COMMAND"] = f"{start(recipe)} {FILE}"
        settings["PEAK_MEMORY_BYTES_BY_RANK: tuple[int, ...]"] = recipe.peak_memory_bytes_by_rank
    for setting, value in settings.items():
        lines.append(f"{setting} = {value!r}")
        name = setting.partition(":")[0]
        if name in _MEANINGS:
            lines.append(f'"""{_MEANINGS[name]}"""')
    lines.append(f"WEIGHTS_DTYPE = torch.{base_dtype(config)}")
    lines += literal_lines("PROMISE: dict[str, Any]", promise)
    lines.append('"""Of the trial; the first steps are compared with it."""')
    return code("\n".join(lines))


_MEANINGS = {
    "GLOBAL_BATCH": "Sequences of one optimizer step.",
    "MICRO_BATCH": "Sequences of one forward pass.",
    "PEAK_MEMORY_BYTES_BY_RANK": "Measured in the trial.",
}


def _forward(config: TrainingConfig) -> Part:
    """Returns the definition of `forward(model, tokens, labels)`."""
    contexts = []
    dtype = autocast_dtype(config)
    if dtype is not None:
        contexts.append(f"torch.autocast(DEVICE, dtype={dtype})")
    if config.activation_offload == "cpu":
        contexts.append("offloaded(model)")
    lines = ["loss: Tensor = model(tokens, labels)"]
    if contexts:
        lines = [f"with {', '.join(contexts)}:", f"    {lines[0]}"]
    body = "\n".join(f"    {line}" for line in [*lines, "return loss"])
    return code(f'''
from typing import Any
import torch
from torch import Tensor

def forward(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """Returns the summed token loss of a micro batch."""
{body}
''')


def _resident_tensors(recipe: Recipe) -> Part:
    """Returns the definition of `resident_tensors(training)`."""
    config = recipe.config
    weights = "*training.model.parameters()"
    imports = ""
    if is_quantized(config):
        imports = "from autotune.shipped.quantized import tensors_behind\n"
        weights = "*(part for one in training.model.parameters() for part in tensors_behind(one))"
    # The optimizer whose state this process has.
    optimizer = "optimizer.optim" if config.sharding == "zero1" else "optimizer"
    # What the communication has on the device between steps.
    is_replicated = recipe.devices > 1 and not divides_weights(config)
    buckets = ", *training.buckets.buffers" if is_replicated else ""
    return code(f'''
{imports}from torch import Tensor
from autotune.shipped.tensors import held_tensors

def resident_tensors(training: Training) -> list[Tensor]:
    """Returns what is there before and after a step: weights, buffers and optimizer state."""
    held = [tensor for module in training.model.modules() for _, tensor in held_tensors(module)]
    state = [
        value
        for of_parameter in training.updater.{optimizer}.state.values()
        for value in of_parameter.values()
        if isinstance(value, Tensor)
    ]
    return [{weights}, *held, *state{buckets}]
''')
