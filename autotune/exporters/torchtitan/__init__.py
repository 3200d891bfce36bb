"""torchtitan: which settings its versions have, and what their files do instead of the others.

torchtitan trains models of its own; the files carry the techniques and the numbers, not the model.
0.3 takes a Python module, 0.2 a TOML file (`files.py`). 0.3 mixes precision by FSDP2 on a single
device too, 0.2 by autocast. Both compile block by block.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from autotune.exporters.export import Export, Refusal, Target
from autotune.exporters.launch import FILE as LAUNCHER
from autotune.exporters.launch import is_needed, launcher
from autotune.exporters.recipe import OPTIMIZER_SETTINGS, Recipe
from autotune.exporters.script_lines import own_script_note
from autotune.exporters.torchtitan.files import ATTENTION_MODULE, attention_module, module, toml


def write(recipe: Recipe, version: str) -> Export:
    refusals = tuple(_refusals(recipe, version))
    done = {**recipe.settings(), **{refusal.setting: refusal.instead for refusal in refusals}}
    if version == "0.3":
        files = {"autotune_export.py": module(recipe, done)}
        arguments = "--module autotune_export --config autotune"
    else:
        files = {"autotune.toml": toml(recipe, done), ATTENTION_MODULE: attention_module(recipe)}
        arguments = "--job.config_file autotune.toml"
    start = "-m torchtitan.train"
    of_the_process = _left_to_the_launcher(recipe)
    if is_needed(of_the_process.config):
        files[LAUNCHER] = launcher(of_the_process)
        start = f"{LAUNCHER} {start}"
    command = f"torchrun --nproc_per_node=1 {start} {arguments}"
    return Export(
        files=files, command=command, refusals=refusals, notes=tuple(_notes(recipe, version, done))
    )


def _left_to_the_launcher(recipe: Recipe) -> Recipe:
    """The recipe with what torchtitan sets by itself at its default."""
    config = dataclasses.replace(recipe.config, memory_budget=1.0, attention="auto")
    return dataclasses.replace(recipe, config=config)


def _refusals(recipe: Recipe, version: str) -> Iterator[Refusal]:
    config = recipe.config
    yield from _optimizer_refusals(recipe)
    found = {
        "precision": _PRECISIONS[version].get(config.precision),
        "checkpointing": _checkpointing(config.checkpointing, version),
        "compile": _WHOLE_MODEL if config.compile == "model" else None,
        "activation_offload": _OFFLOAD if config.activation_offload == "cpu" else None,
    }
    if version == "0.3":
        found["optimizer_fusion"] = _BACKWARD if config.optimizer_fusion == "backward" else None
        found["attention"] = _FLEX if config.attention != "flash" else None
    else:
        found["loss"] = _FULL if config.loss == "chunked" else None
    for setting, refused in found.items():
        if refused is not None:
            yield Refusal(
                setting=setting, value=getattr(config, setting), instead=refused[0], why=refused[1]
            )


_FSDP2 = "it mixes precision by FSDP2, which takes the residual stream and every norm to bfloat16 as well"
_AUTOCAST = (
    "on one device it has autocast around every forward pass: norms and softmax compute in float32"
)
_PRECISIONS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "0.3": {
        "bf16-mixed": ("bf16-mixed by FSDP2", f"torchtitan 0.3 has no autocast: {_FSDP2}"),
        "fp16-mixed": (
            "bf16-mixed by FSDP2",
            f"torchtitan has no float16 and no loss scaling: {_FSDP2}",
        ),
        "bf16-stochastic": (
            "bf16-true",
            "torchtitan rounds updates of bfloat16 weights to nearest",
        ),
        "fp8": (
            "fp8 by rows",
            f"torchtitan 0.3 has no scale a tensor, only one a row, and no autocast: {_FSDP2}",
        ),
    },
    "0.2": {
        "fp16-mixed": ("bf16-mixed", "torchtitan has no float16 and no loss scaling"),
        "bf16-true": (
            "bf16-true under autocast",
            f"torchtitan 0.2 keeps weights in bfloat16, but {_AUTOCAST}",
        ),
        "bf16-stochastic": (
            "bf16-true under autocast",
            f"torchtitan rounds updates of bfloat16 weights to nearest, and {_AUTOCAST}",
        ),
    },
}
"""By version: {precision that it does not do: (what the files do instead, why)}."""

_WHOLE_MODEL = (
    "block",
    "torchtitan compiles each block on its own; what is before and after them stays eager",
)
_OFFLOAD = (
    "none",
    "torchtitan moves parameters, gradients and optimizer state to the host (training.enable_cpu_offload), but no "
    "activations",
)
_BACKWARD = (
    "kernel",
    "torchtitan 0.3 has no optimizer step in backward any more; target version 0.2 has it",
)
_FLEX = (
    "flex",
    "torchtitan 0.3 has no scaled_dot_product_attention for language models, but FlexAttention and a flash kernel; "
    "target version 0.2 has it",
)
_FULL = ("full", "torchtitan 0.2 makes all logits at once; target version 0.3 has a loss in chunks")


def _optimizer_refusals(recipe: Recipe) -> Iterator[Refusal]:
    name = recipe.config.optimizer
    if name == "adamw":
        return
    yield Refusal(
        setting="optimizer", value=name, instead="adamw", why="torchtitan has only Adam and AdamW"
    )
    theirs = {
        "learning_rate": recipe.workload.learning_rate_of("adamw"),
        "weight_decay": OPTIMIZER_SETTINGS["adamw"]["weight_decay"],
    }
    for setting, instead in theirs.items():
        if (value := recipe.settings()[setting]) != instead:
            why = f"it belongs to {name}; the files have what trials of adamw train with"
            yield Refusal(setting=setting, value=value, instead=instead, why=why)


def _checkpointing(value: str, version: str) -> tuple[str, str] | None:
    """(What the files do instead, why); None where torchtitan does just this."""
    if value in ("none", "block"):
        return None
    if value == "selective":
        why = "torchtitan recomputes every second matrix product, a trial keeps them all: less memory, more time"
        return ("selective, every second product", why)
    if value in _EVERY and version == "0.2":
        every = _EVERY[value]
        why = (
            f"torchtitan checkpoints blocks {every - 1}, {2 * every - 1}, ..., a trial 0, {every}, ...: as many where "
            f"their number is divisible by {every}, else one fewer"
        )
        return (f"{value} from block {every - 1} on", why)
    return (
        "block",
        f"torchtitan {version} cannot checkpoint {_IN_WORDS[value]}; the files checkpoint every block",
    )


_EVERY = {"every-2": 2, "every-4": 4}
_IN_WORDS = {
    "every-2": "every second block alone",
    "every-4": "every fourth block alone",
    "attention": "the attention parts alone",
    "sqrt": "segments of several blocks",
}


def _notes(recipe: Recipe, version: str, done: Mapping[str, Any]) -> Iterator[str]:
    yield from own_script_note(recipe.workload)
    place = "the first lines of autotune()" if version == "0.3" else "[model] and [training]"
    yield f"model, tokenizer and text are torchtitan's own for trying out: put yours into {place}"
    yield "torchtitan needs triton and does not install it: pip install triton"
    if version == "0.3":
        yield "torchtitan 0.3 runs FSDP2 on one device as well, which copies the weights of a block while it computes"
    if done["attention"] == "flash" and version == "0.3":
        yield "flash attention is that for sequences of different lengths, with a mask between documents"
    if version == "0.2" and recipe.config.attention == "auto":
        yield "attention kernels are tried in the order flash, efficient, math, cudnn; torch itself may prefer cudnn"
    if recipe.config.precision == "fp8":
        yield "fp8 needs torchao and a device of compute capability 8.9 or newer"


TARGET = Target(
    title="torchtitan",
    versions=("0.3", "0.2"),
    checked_with="torchtitan 0.3.0 and 0.2.2",
    write=write,
)
