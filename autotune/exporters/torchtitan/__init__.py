"""torchtitan: the settings that its versions support, and what the files do instead of the others.

torchtitan trains its own models, so the files contain techniques and numbers, not the model. 0.3
takes a Python module, 0.2 a TOML file (`files.py`). 0.3 mixes precision with FSDP2, on a single
device as well; 0.2 uses autocast. Both compile block by block.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from autotune.exporters.adapters import UNTRAINED, lacks_beside_adapters
from autotune.exporters.devices import Closest, divides_weights
from autotune.exporters.export import Export, Target
from autotune.exporters.launch import FILE as LAUNCHER
from autotune.exporters.launch import is_needed, launcher
from autotune.exporters.reasons import WITH_MODES, Reason, Table, reasons_in
from autotune.exporters.recipe import Recipe
from autotune.exporters.script_lines import answers_note, user_script_note
from autotune.exporters.several_nodes import note, torchrun
from autotune.exporters.torchtitan.files import ATTENTION_MODULE, attention_module, module, toml
from autotune.spec.config import CUDA_GRAPHS, TrainingConfig
from autotune.spec.workload import BESIDE_ADAPTERS


def write(recipe: Recipe, version: str) -> Export:
    closest = _closest(recipe, version)
    closest.lacks({"precision": _precision(closest.config, version)})
    closest.lacks({"checkpointing": _checkpointing(closest.config.checkpointing, version)})
    closest.lacks(reasons_in({**_LACKING, **_LACKING_IN[version]}, closest.config))
    recipe, effective = closest.recipe, closest.effective()
    if version == "0.3":
        files = {"autotune_export.py": module(recipe, effective)}
        arguments = "--module autotune_export --config autotune"
    else:
        files = {
            "autotune.toml": toml(recipe, effective),
            ATTENTION_MODULE: attention_module(recipe),
        }
        arguments = "--job.config_file autotune.toml"
    start = "-m torchtitan.train"
    # Without what torchtitan makes itself.
    launcher_config = dataclasses.replace(recipe.config, memory_budget=1.0, attention="auto")
    if is_needed(launcher_config):
        files[LAUNCHER] = launcher(dataclasses.replace(recipe, config=launcher_config))
        start = f"{LAUNCHER} {start}"
    options = torchrun(recipe, f"--nproc_per_node={recipe.devices}")
    command = f"torchrun {options} {start} {arguments}"
    return Export(
        files=files,
        command=command,
        unsupported=closest.unsupported(),
        notes=(*_notes(recipe, version, effective), *note(recipe)),
    )


def _closest(recipe: Recipe, version: str) -> Closest:
    """Returns the closest recipe that torchtitan can share out among devices."""
    closest = Closest(recipe, "torchtitan", WITH_MODES)
    _fit_adapter(closest, version)
    closest.use_torch("torchtitan has no DeepSpeed")
    closest.leave_out_zero1()
    if version == "0.2" and closest.config.sharding == "ddp":
        why = "torchtitan 0.2 has DistributedDataParallel on its own only"
        closest.leave_out_tensor_parallel(why)
    closest.change("gradient_reduction", "fp32", "torchtitan adds up gradients in float32 only")
    config = closest.config
    if config.compile_mode in CUDA_GRAPHS:
        why = (
            "torchtitan compiles block by block, whose CUDA graphs overwrite one another's results"
        )
        closest.change("compile_mode", _WITHOUT_CUDA_GRAPHS[config.compile_mode], why)
    if config.offload == "optimizer" and _has_fsdp2(config, version):
        why = "FSDP2 moves weights and gradients together with the optimizer's state"
        closest.change("offload", "all", why)
    elif not _has_fsdp2(config, version):
        closest.leave_out_offload(
            "torchtitan 0.2 moves what is shared out, and nothing else; target version 0.3 does "
            "on one device as well"
        )
    return closest


_WITHOUT_CUDA_GRAPHS = {
    "reduce-overhead": "default",
    "max-autotune": "max-autotune-no-cudagraphs",
}


def _has_fsdp2(config: TrainingConfig, version: str) -> bool:
    return version == "0.3" or divides_weights(config)


_FSDP2 = "it uses FSDP2, which computes the residual stream and every norm in bfloat16 as well"
_AUTOCAST = (
    "on one device it runs every forward pass under autocast: norms and softmax compute in float32"
)
_NO_INT8 = "torchtitan converts layers to float8 and mxfp8, not to int8"
_PRECISIONS: Mapping[str, Mapping[str, Reason]] = {
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
            f"torchtitan 0.3 has one scale per row, not one per tensor, and no autocast: {_FSDP2}",
        ),
        "int8-mixed": ("bf16-mixed by FSDP2", f"{_NO_INT8}, and no autocast: {_FSDP2}"),
    },
    "0.2": {
        "fp16-mixed": ("bf16-mixed", "torchtitan has no float16 and no loss scaling"),
        "bf16-true": (
            "bf16-true under autocast",
            f"torchtitan 0.2 stores weights in bfloat16, but {_AUTOCAST}",
        ),
        "bf16-stochastic": (
            "bf16-true under autocast",
            f"torchtitan rounds updates of bfloat16 weights to nearest, and {_AUTOCAST}",
        ),
        "int8-mixed": ("bf16-mixed", _NO_INT8),
    },
}
"""{version: {precision that it does not support: (what the files do instead, why)}}."""


def _precision(config: TrainingConfig, version: str) -> Reason | None:
    """Returns (what the files do instead, why), or None if torchtitan supports it."""
    if version == "0.2" and divides_weights(config):
        return _BY_FSDP2.get(config.precision)
    if version == "0.2" and config.tensor_parallel > 1:
        return _SPLIT.get(config.precision)
    return _PRECISIONS[version].get(config.precision)


_SHARED = f"torchtitan 0.2 has no autocast where weights are shared out: {_FSDP2}"
_BY_FSDP2 = {
    "bf16-mixed": ("bf16-mixed by FSDP2", _SHARED),
    "fp16-mixed": ("bf16-mixed by FSDP2", "torchtitan has no float16 and no loss scaling"),
    "bf16-stochastic": ("bf16-true", "torchtitan rounds updates of bfloat16 weights to nearest"),
    "fp8": ("fp8, the rest by FSDP2", _SHARED),
    "int8-mixed": ("bf16-mixed by FSDP2", _NO_INT8),
}
_NO_AUTOCAST = "torchtitan 0.2 has no autocast with split matrices alone"
_SPLIT = {
    "bf16-mixed": ("fp32", _NO_AUTOCAST),
    "fp16-mixed": ("fp32", _NO_AUTOCAST),
    "bf16-stochastic": ("bf16-true", "torchtitan rounds updates of bfloat16 weights to nearest"),
    "fp8": ("fp8 in fp32", _NO_AUTOCAST),
}
"""What 0.2 does instead where it shares out weights, and where it only splits matrices."""

_LACKING: Table = {
    "compile": {
        "model": (
            "block",
            "torchtitan compiles each block separately; the layers before and after them stay "
            "eager",
        )
    },
    "activation_offload": {
        "cpu": (
            "none",
            "torchtitan can move parameters, gradients and optimizer state to the host "
            "(training.enable_cpu_offload), but not activations",
        )
    },
}
_FLEX = (
    "flex",
    "torchtitan 0.3 has FlexAttention and a flash kernel for language models, but no "
    "scaled_dot_product_attention; target version 0.2 has it",
)
_LACKING_IN: Mapping[str, Table] = {
    "0.3": {
        "optimizer_fusion": {
            "backward": (
                "kernel",
                "torchtitan 0.3 no longer has an optimizer step in backward; target version 0.2 "
                "has it",
            )
        },
        "attention": dict.fromkeys(("auto", "efficient", "cudnn", "math"), _FLEX),
    },
    "0.2": {
        "loss": {
            "chunked": (
                "full",
                "torchtitan 0.2 computes all logits at once; target version 0.3 has a loss in "
                "chunks",
            )
        }
    },
}
"""{version: what it does not express, in addition}."""


def _fit_adapter(closest: Closest, version: str) -> None:
    """Change the adapters that torchtitan does not have."""
    if version == "0.2":
        why = "torchtitan 0.2 has no adapters: all weights are trained, in much more memory"
        for setting, instead in UNTRAINED.items():
            closest.change(setting, instead, why)
    else:
        why = "its LoRA has a rank and an alpha alone, and trains nothing whole beside adapters"
    trial = closest.trial
    lacking = set(BESIDE_ADAPTERS) - ({"adapter_alpha"} if version != "0.2" else set())
    closest.lacks(lacks_beside_adapters(trial.config, trial.workload, why, settings=lacking))
    if closest.config.adapter == "dora":
        closest.change("adapter", "lora", "torchtitan's adapters have no magnitudes")
    why = "torchtitan stores frozen weights in the number format of training"
    closest.change("base_weights", "trained", why)


def _checkpointing(value: str, version: str) -> Reason | None:
    """Returns (what the files do instead, why), or None if torchtitan supports `value`."""
    if value in ("none", "block", "selective-2"):
        return None
    if value == "selective":
        why = (
            "torchtitan recomputes every second matrix product, the trial none: less memory, more "
            "time"
        )
        return ("selective-2", why)
    if value in _EVERY and version == "0.2":
        every = _EVERY[value]
        why = (
            f"torchtitan checkpoints blocks {every - 1}, {2 * every - 1}, ..., the trial 0, "
            f"{every}, ...: the same number if the blocks are divisible by {every}, else one fewer"
        )
        return (f"{value} from block {every - 1} on", why)
    why = f"torchtitan {version} cannot checkpoint {_DESCRIPTIONS[value]}; the files checkpoint all"
    return ("block", f"{why} blocks")


_EVERY = {"every-2": 2, "every-4": 4}
_DESCRIPTIONS = {
    "save-attention": "all but the attention kernels",
    "every-2": "only every second block",
    "every-4": "only every fourth block",
    "attention": "only the attention parts",
    "sqrt": "segments of several blocks",
}


def _notes(recipe: Recipe, version: str, effective: Mapping[str, Any]) -> Iterator[str]:
    yield from user_script_note(recipe.workload)
    yield from answers_note(recipe.workload)
    where = "the first lines of autotune()" if version == "0.3" else "[model] and [training]"
    yield f"model, tokenizer and text are torchtitan's debug ones: put yours into {where}"
    yield "torchtitan needs triton and does not install it: pip install triton"
    if version == "0.3":
        yield (
            "torchtitan 0.3 uses FSDP2 on one device as well, which copies the weights of a block "
            "while it computes"
        )
    if effective["attention"] == "flash" and version == "0.3":
        yield (
            "flash attention is the variant for sequences of different lengths, with a mask "
            "between documents"
        )
    if version == "0.2" and recipe.config.attention == "auto":
        yield (
            "attention kernels are tried in the order flash, efficient, math, cudnn; torch itself "
            "may prefer cudnn"
        )
    if effective["adapter"] != "none":
        yield (
            "adapters are beside the layers that models of torchtitan have, one for query, key and "
            "value together: fewer parameters than in a model that has three layers for them"
        )
    if recipe.config.precision == "fp8":
        yield "fp8 needs torchao and a device of compute capability 8.9 or newer"


TARGET = Target(
    title="torchtitan",
    versions=("0.3", "0.2"),
    checked_with="torchtitan 0.3.0 and 0.2.2",
    write=write,
)
