"""Techniques in an exported script: definitions of autotune and the lines that apply them.

The order is that of `autotune/techniques/__init__.py`. Techniques that the configuration does not
use are omitted.
"""

import dataclasses
import itertools
from collections import defaultdict

from autotune.exporters.adapters import (
    is_quantized,
    saved_dtype,
    torchao_class,
    trained_dtype,
)
from autotune.exporters.bundle import Part, code, shipped
from autotune.exporters.devices import divides_weights
from autotune.exporters.recipe import Recipe
from autotune.exporters.script_lines import imported_optimizer, parameters_of
from autotune.spec.adapters import lora_arguments
from autotune.spec.config import (
    QUANTIZED_EXPERTS,
    QUANTIZED_WEIGHTS,
    SELECTIVE,
    TrainingConfig,
)
from autotune.spec.model_choice import MODEL_NAMES
from autotune.spec.optimizers import OPTIMIZERS
from autotune.spec.prediction import KeptOfBlock
from autotune.spec.setting import NO_LIMIT
from autotune.spec.workload import Workload

_AUTOCAST = {
    "bf16-mixed": "torch.bfloat16",
    "fp8": "torch.bfloat16",
    "int8-mixed": "torch.bfloat16",
    "fp16-mixed": "torch.float16",
}
CONVERSIONS = {"fp8": "convert(block)", "int8-mixed": "use_int8(block)"}
"""The statements that make the linear layers of a block multiply in 8 bits."""
_EVERY = {"every-2": 2, "every-4": 4}


def autocast_dtype(config: TrainingConfig) -> str | None:
    """Returns the dtype of autocast as an expression; None without autocast."""
    return _AUTOCAST.get(config.precision)


def technique_parts(recipe: Recipe) -> list[Part]:
    """Returns the definitions of `apply_techniques(model)`, `prepare(model)` and `Updater`."""
    config = recipe.config
    return [
        *kept_parts(recipe),
        _application(recipe),
        shipped(*technique_modules(config), *_modules_of_scripts(config)),
        *_prepare(recipe),
        *_optimizer(recipe),
    ]


def kept_parts(recipe: Recipe) -> list[Part]:
    """Returns the definition of what each block keeps; nothing without an activation budget."""
    if recipe.config.activation_budget == NO_LIMIT:
        return []
    lines = ["KEPT: list[Kept | None] = ["]
    for planned, alike in itertools.groupby(recipe.kept):
        count = len(list(alike))
        lines.append(f"    *[{_kept(planned)}] * {count},")
    text = "\n".join([*lines, "]"])
    budget = recipe.config.activation_budget
    return [
        code(f'''
from autotune.shipped.granularity import Kept, recompute_but

{text}
"""What each block keeps for its backward pass, so that the peak is within {budget}: results of the
operators with these names, by the number of the call in the block, from 0 on. The rest runs again;
of a block with names of parts only these parts do, and nothing of one with None. Planned for the
shapes of the trial."""
''')
    ]


def _kept(planned: KeptOfBlock) -> str:
    """Returns what a block keeps as an expression."""
    if planned.operators is None or planned.recomputed_parts:
        return repr(planned.recomputed_parts or None).replace("'", '"')
    calls = [operator.rpartition(" ") for operator in planned.operators]
    listed = ", ".join(f'("{name}", {number})' for name, _, number in calls)
    return f"frozenset({{{listed}}})" if listed else "frozenset()"


KEEPING_LINES = (
    "for block, kept in zip(dict.fromkeys({blocks}), KEPT, strict=True):",
    "    recompute_but(block, kept)",
)
"""Make each block keep what is planned for it."""


def _prepare(recipe: Recipe) -> list[Part]:
    """Returns the definition of `prepare(model)`.

    It moves a model to the device, and freezes it and adds adapters to it if these are trained.
    """
    config = recipe.config
    moving = "weights"
    if is_quantized(config):
        moving = "weights_quantized"
    elif divides_weights(config) or config.offload == "frozen":
        moving = "weights_on_host"
    parts = [shipped(f"script.{moving}")]
    if config.adapter == "none":
        return [*parts, code(_PREPARE)]
    bits = 4 if QUANTIZED_WEIGHTS.get(config.base_weights) == "nf4" else 8
    if is_quantized(config):
        if bits == 8:
            kind = torchao_class(config)
            imported = f"from torchao.quantization import {kind}"
            parts.append(code(f"{imported}\n\nQUANTIZATION = {kind}()"))
        parts.append(shipped(f"script.quantize_to_{bits}_bits"))
    if config.base_weights in QUANTIZED_EXPERTS:
        parts.append(shipped(f"script.experts_in_{bits}_bits"))
    return [*parts, _add_adapters(recipe)]


_PREPARE = """
from torch import nn

def prepare(model: nn.Module) -> None:
    move_to_device(model)
"""


def _add_adapters(recipe: Recipe) -> Part:
    config, workload = recipe.config, recipe.workload
    lines = [
        "found = find_blocks(model)",
        'assert found is not None, "the model has no list of blocks of one class"',
        "parts = list(found.blocks)",
    ]
    if config.base_weights in QUANTIZED_EXPERTS or config.adapter_targets == "experts":
        lines.append("experts = expert_weights(model, parts)")
    if is_quantized(config):
        lines.append("quantize(model, linear_layers(model, parts))")
    if config.base_weights in QUANTIZED_EXPERTS:
        lines.append("quantize_experts(model, experts)")
    lines.append("move_to_device(model)")
    if config.adapter_targets == "attention":
        lines += [
            'assert found.attention_name is not None, "the blocks have no attention"',
            "parts = [getattr(block, found.attention_name) for block in parts]",
        ]
    lines += [
        "layers = linear_layers(model, parts)",
        *adding_lines(config, workload),
        "draw_adapters(model, seed=SEED)",
    ]
    if workload.adapter_init == "pissa":
        lines.append("begin_as_principal(model, seed=SEED)")
        workload = dataclasses.replace(workload, adapter_init="standard")
    if config.base_weights in QUANTIZED_EXPERTS:
        lines.append("dequantize_in_calls(model, experts)")
    if config.offload == "frozen":
        lines.append("keep_frozen_on_host(model, list(found.blocks), DEVICE)")
    body = "\n".join(f"    {line}" for line in lines)
    return code(f'''
from typing import Any
import torch
from autotune.shipped.adapter_weights import begin_as_principal, draw_adapters
from autotune.shipped.adapters import add_adapters, linear_layers
from autotune.shipped.blocks import find_blocks
from autotune.shipped.experts import dequantize_in_calls, expert_weights

{adapter_constants(config, workload)}


def prepare(model: Any) -> None:
    """Moves the model to the device, freezes it and adds the adapters, which are trained."""
{body}
''')


def adapter_constants(config: TrainingConfig, workload: Workload) -> str:
    """Returns the constants of `adding_lines`, a definition each."""
    lines = [f"ADAPTER_DTYPE = torch.{trained_dtype(config)}"]
    if workload.modules_to_save:
        lines.append(f"MODULES_DTYPE = torch.{saved_dtype(config, workload)}")
    lines.append("ADAPTER_SETTINGS: dict[str, Any] = {")
    settings = lora_arguments(config, workload)
    lines += [f'    "{name}": {value!r},'.replace("'", '"') for name, value in settings.items()]
    return "\n".join([*lines, "}"])


def adding_lines(config: TrainingConfig, workload: Workload) -> list[str]:
    """Returns the statements that add adapters to `layers` of a model, by `shipped/adapters.py`."""
    others = ", modules_dtype=MODULES_DTYPE" if workload.modules_to_save else ""
    others += ", experts=experts" if config.adapter_targets == "experts" else ""
    added = f"add_adapters(model, layers, ADAPTER_SETTINGS, dtype=ADAPTER_DTYPE{others})"
    return [added, "fuse_adapters(model)"] if config.adapter_kernels == "fused" else [added]


def technique_modules(config: TrainingConfig) -> list[str]:
    """Returns the modules of `autotune.shipped` with the techniques in the model and the update.

    Checkpointing and kernels are not among them (`_modules_of_scripts`).
    """
    needed = {
        "chunked_loss": config.loss == "chunked",
        "fp8": config.precision == "fp8",
        "int8": config.precision == "int8-mixed",
        "fused_adapters": config.adapter_kernels == "fused",
        "tiled": config.feed_forward == "tiled",
        "activation_offload": config.activation_offload == "cpu",
        "stochastic_rounding": config.precision == "bf16-stochastic",
        "step_in_backward": config.optimizer_fusion == "backward",
        "fp32_gradients": config.gradient_accumulation_dtype == "fp32",
        "frozen_on_host": config.offload == "frozen",
    }
    modules = [module for module, is_needed in needed.items() if is_needed]
    return [*modules, *OPTIMIZERS[config.optimizer].shipped_modules]


def _modules_of_scripts(config: TrainingConfig) -> list[str]:
    """Returns those with what transformers' Trainer does in another way, or by a key."""
    is_recomputed = config.checkpointing != "none"
    needed = {
        "checkpointing": is_recomputed,
        "segments": config.checkpointing == "sqrt",
        "selective": config.checkpointing in SELECTIVE,
        "compiling": is_recomputed and config.compile != "none",
        "liger": config.kernels == "liger",
    }
    return [module for module, is_needed in needed.items() if is_needed]


def _application(recipe: Recipe) -> Part:
    config = recipe.config
    is_ours = recipe.workload.model in MODEL_NAMES
    lines = ["model.token_loss = chunked_token_loss"] if config.loss == "chunked" else []
    lines += ["use_liger(model)"] if config.kernels == "liger" else []
    lines += _block_lines(config, is_ours=is_ours)
    if config.compile == "model":
        compiled = _compile(config, "model")
        lines.append(f"{compiled}  # last: the graph contains all of the above")
    if not lines:
        lines.append("# This configuration has no technique inside the model.")
    body = "\n".join(f"    {line}" for line in lines)
    text = f'''
from typing import Any

def apply_techniques(model: Any) -> None:
    """Applies the techniques inside the model, in the order in which they work together."""
{body}
'''
    return code(text)


def _compile(config: TrainingConfig, module: str) -> str:
    """Returns the statement that compiles a module."""
    if config.checkpointing == "none":
        return f"{module}.compile(dynamic=False)"
    return f"compile_in_place({module})"


def _block_lines(config: TrainingConfig, *, is_ours: bool) -> list[str]:
    """Returns the lines that change the blocks; `is_ours` for a model that is built in."""
    lines = []
    if config.precision in CONVERSIONS:
        lines += [
            "# First, so that checkpointing and compilation see the converted layers.",
            "for block in blocks:",
            f"    {CONVERSIONS[config.precision]}",
        ]
    if config.feed_forward == "tiled":
        attention = '"attention"' if is_ours else "found.attention_name"
        lines.append(f"tile_blocks(blocks, {attention})")
    if config.activation_budget != NO_LIMIT:
        lines += [line.format(blocks="blocks") for line in KEEPING_LINES]
    kind = config.checkpointing
    recomputed = {
        "attention": ("blocks", "getattr(block, found.attention_name)"),
        "selective": ("blocks", "block, context_fn=selective_contexts"),
        "selective-2": ("blocks", "block, context_fn=alternating_contexts"),
        "save-attention": ("blocks", "block, context_fn=attention_contexts"),
        "block": ("blocks", "block"),
        **{name: (f"blocks[::{every}]", "block") for name, every in _EVERY.items()},
    }
    if is_ours:
        recomputed["attention"] = ("blocks", "block.attention")
    if kind in recomputed:
        blocks, arguments = recomputed[kind]
        lines += [f"for block in {blocks}:", f"    recompute({arguments})"]
    if config.compile == "block":
        lines += [
            "for block in blocks:",
            f"    {_compile(config, 'block')}  # includes the recomputation",
        ]
    if kind == "sqrt":
        lines.append("recompute_segments(blocks)")
    if not lines:
        return []
    if is_ours:
        return ["blocks = list(model.blocks)", *lines]
    return [
        "found = find_blocks(model)",
        'assert found is not None, "the model has no list of blocks of one class"',
        "blocks = list(found.blocks)",
        *lines,
    ]


# -- the update ------------------------------------------------------------------------------------


def _optimizer(recipe: Recipe) -> list[Part]:
    """Returns the definitions of `make_optimizer` and of `Updater`, which uses it."""
    config = recipe.config
    is_divided = config.sharding == "zero1"
    name = "make_part" if is_divided else "make_optimizer"
    if config.precision == "bf16-stochastic":
        parts = [_make_optimizer(recipe, name="make_unrounded"), _rounded(recipe, name)]
    else:
        parts = [_make_optimizer(recipe, name=name)]
    if is_divided:
        parts.append(code(_DIVIDED.format(parameters=parameters_of(recipe))))
    if config.optimizer_fusion == "backward":
        return [*parts, shipped("script.update_in_backward")]
    parts.append(code(f"GRADIENT_CLIPPING: float | None = {recipe.workload.gradient_clipping}"))
    is_scaled = config.precision == "fp16-mixed"
    return [*parts, shipped("script.update_from_scaled_loss" if is_scaled else "script.update")]


def _make_optimizer(recipe: Recipe, *, name: str) -> Part:
    facts = recipe.optimizer
    flags = facts.flags(recipe.config.optimizer_fusion)
    settings: dict[str, object] = {"lr": "LEARNING_RATE", **facts.arguments, **flags}
    kind, import_class = imported_optimizer(recipe)
    arguments = "".join(f"        {setting}={value},\n" for setting, value in settings.items())
    call = f"{kind}(\n        {_updated(recipe, name)},\n{arguments}    )"
    returned = returning(call, recipe.config) if name == "make_optimizer" else f"return {call}"
    return code(
        f"{import_class}\nimport torch\nfrom torch import nn\n\n"
        f"def {name}({_ARGUMENTS[name]}) -> torch.optim.Optimizer:\n    {returned}"
    )


def returning(optimizer: str, config: TrainingConfig) -> str:
    """Returns the end of a function that returns an optimizer, of which this is the expression."""
    if config.gradient_accumulation_dtype == "weights":
        return f"return {optimizer}"
    return f"optimizer = {optimizer}\n    return accumulate_in_fp32(optimizer)"


_ARGUMENTS = defaultdict(
    lambda: "parameters: list[nn.Parameter]",
    make_optimizer="parameters: list[nn.Parameter], model: nn.Module",
)
"""{function: its arguments}: one that makes an optimizer inside of another gets parts of them."""


def _updated(recipe: Recipe, name: str) -> str:
    return parameters_of(recipe) if name == "make_optimizer" else "parameters"


def _rounded(recipe: Recipe, name: str) -> Part:
    call = f"""StochasticallyRounded(
        {_updated(recipe, name)}, make_unrounded, learning_rate=LEARNING_RATE, seed=SEED
    )"""
    return code(f"""
import torch
from torch import nn
from autotune.shipped.stochastic_rounding import StochasticallyRounded

def {name}({_ARGUMENTS[name]}) -> torch.optim.Optimizer:
    {returning(call, recipe.config)}
""")


_DIVIDED = '''
from typing import Any
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

def make_optimizer(parameters: list[nn.Parameter], model: nn.Module) -> ZeroRedundancyOptimizer:
    """Returns an optimizer whose parameters are divided among the ranks: ZeRO's first stage.

    Each rank updates its own and sends them to the others.
    """

    def make(parameters: Any, **defaults: Any) -> torch.optim.Optimizer:
        return make_part(parameters)

    return ZeroRedundancyOptimizer({parameters}, optimizer_class=make, lr=LEARNING_RATE)
'''
