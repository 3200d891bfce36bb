"""Techniques in an exported script: definitions of autotune and the lines that apply them.

The order is that of `autotune/techniques/__init__.py`. Techniques that the configuration does not
use are omitted.
"""

from autotune.exporters.adapters import (
    ALPHA,
    is_quantized,
    torchao_class,
    trained_dtype,
)
from autotune.exporters.bundle import Part, code, shipped
from autotune.exporters.pytorch.devices import divide_state_part
from autotune.exporters.recipe import Recipe
from autotune.exporters.script_lines import imported_optimizer, optimizer_flags
from autotune.spec.config import TrainingConfig
from autotune.spec.model_choice import MODEL_NAMES

_AUTOCAST = {"bf16-mixed": "torch.bfloat16", "fp8": "torch.bfloat16", "fp16-mixed": "torch.float16"}
_EVERY = {"every-2": 2, "every-4": 4}


def autocast_dtype(config: TrainingConfig) -> str | None:
    """Return the dtype of autocast as an expression; None without autocast."""
    return _AUTOCAST.get(config.precision)


def technique_parts(recipe: Recipe) -> list[Part]:
    """Return the definitions of `apply_techniques(model)` and `Updater(parameters)`."""
    config = recipe.config
    return [_application(recipe), *_adapters(config), *_optimizer(recipe)]


def _adapters(config: TrainingConfig) -> list[Part]:
    """Return the definition of `adapt(model)`, which freezes a model and adds adapters to it."""
    if config.adapter == "none":
        return []
    lines = [
        "found = find_blocks(model)",
        'assert found is not None, "the model has no list of blocks of one class"',
        "parts = list(found.blocks)",
    ]
    if is_quantized(config):
        lines.append("quantize(model, linear_layers(model, parts))")
    lines.append("move_to_device(model)")
    if config.adapter_targets == "attention":
        lines += [
            'assert found.attention_name is not None, "the blocks have no attention"',
            "parts = [getattr(block, found.attention_name) for block in parts]",
        ]
    lines += [
        "layers = linear_layers(model, parts)",
        "add_adapters(model, layers, ADAPTER_SETTINGS, dtype=ADAPTER_DTYPE)",
        "draw_adapters(model, seed=SEED)",
    ]
    body = "\n".join(f"    {line}" for line in lines)
    text = f'''
from typing import Any
import torch
from autotune.shipped.adapter_weights import draw_adapters
from autotune.shipped.adapters import add_adapters, linear_layers
from autotune.shipped.blocks import find_blocks

ADAPTER_DTYPE = torch.{trained_dtype(config)}
ADAPTER_SETTINGS: dict[str, Any] = {{
    "r": {config.adapter_rank},
    "lora_alpha": {ALPHA},
    "lora_dropout": 0.0,
    "use_dora": {config.adapter == "dora"},
}}


def adapt(model: Any) -> None:
    """Moves the model to the device, freezes it and adds the adapters, which are trained."""
{body}
'''
    parts = [code(text)]
    if config.base_weights == "nf4":
        parts.append(code(_IN_4_BITS))
    elif is_quantized(config):
        parts.append(code(_BY_TORCHAO.replace("CONFIG", torchao_class(config))))
    return parts


_BY_TORCHAO = '''
import torch
from torch import nn
from torchao.quantization import CONFIG, quantize_
from autotune.shipped.quantized import is_quantized

@torch.no_grad()
def quantize(model: nn.Module, layers: list[str]) -> None:
    """Stores the weights of these layers in 8 bits, one after the other on the device."""
    for path in layers:
        layer = model.get_submodule(path)
        if isinstance(layer, nn.Linear):
            layer.weight.requires_grad_(False).data = layer.weight.to(WEIGHTS_DTYPE).to(DEVICE)
            quantize_(layer, CONFIG())
'''

_IN_4_BITS = '''
from typing import Any
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn
from autotune.shipped.quantized import is_quantized

@torch.no_grad()
def quantize(model: nn.Module, layers: list[str]) -> None:
    """Stores the weights of these layers in 4 bits, one after the other on the device."""
    kind: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": True}
    for path in layers:
        layer = model.get_submodule(path)
        if isinstance(layer, nn.Linear):
            sizes = (layer.in_features, layer.out_features, layer.bias is not None)
            four_bit = Linear4bit(*sizes, compute_dtype=WEIGHTS_DTYPE, device="meta", **kind)
            weight = layer.weight.to(WEIGHTS_DTYPE)
            four_bit.weight = Params4bit(weight, requires_grad=False, **kind).to(DEVICE)
            four_bit.bias = layer.bias
            four_bit.support_avx512bf16_for_cpu = False  # it would rearrange weights to evaluate
            owner, _, name = path.rpartition(".")
            setattr(model.get_submodule(owner), name, four_bit)
    model.is_loaded_in_4bit = True  # peft looks for it
'''


def technique_modules(config: TrainingConfig) -> list[str]:
    """Return the modules of `autotune.shipped` with the techniques inside the model and the update.

    Checkpointing is not among them: it is another for transformers' Trainer.
    """
    needed = {
        "chunked_loss": config.loss == "chunked",
        "fp8": config.precision == "fp8",
        "activation_offload": config.activation_offload == "cpu",
        "adafactor_fixed_rate": config.optimizer == "adafactor-fixed-rate",
        "stochastic_rounding": config.precision == "bf16-stochastic",
        "step_in_backward": config.optimizer_fusion == "backward",
    }
    return [module for module, is_needed in needed.items() if is_needed]


def _checkpointing_modules(config: TrainingConfig) -> list[str]:
    if config.checkpointing == "none":
        return []
    more = {"selective": ["selective"], "sqrt": ["segments"]}
    return ["checkpointing", *more.get(config.checkpointing, [])]


def _application(recipe: Recipe) -> Part:
    config = recipe.config
    is_ours = recipe.workload.model in MODEL_NAMES
    lines = [*_loss_lines(config), *_block_lines(config, is_ours=is_ours)]
    if config.compile == "model":
        lines.append("model.compile(dynamic=False)  # last: the graph contains all of the above")
    if not lines:
        lines.append("# This configuration has no technique inside the model.")
    body = "\n".join(f"    {line}" for line in lines)
    imports = "import itertools\n" if config.checkpointing == "sqrt" else ""
    text = f'''
{imports}from typing import Any

def apply_techniques(model: Any) -> None:
    """Applies the techniques inside the model, in the order in which they work together."""
{body}
'''
    return code(text)


def _loss_lines(config: TrainingConfig) -> list[str]:
    return ["model.token_loss = chunked_token_loss"] if config.loss == "chunked" else []


def _block_lines(config: TrainingConfig, *, is_ours: bool) -> list[str]:
    """Return the lines that change the blocks; `is_ours` for a model that is built in."""
    lines = []
    if config.precision == "fp8":
        lines += [
            "# First, so that checkpointing and compilation see the converted layers.",
            "for block in blocks:",
            "    convert(block)",
        ]
    kind = config.checkpointing
    if kind == "attention" and is_ours:
        lines += [
            "for block in blocks:",
            "    block.attention = Checkpointed(block.attention)",
        ]
    elif kind == "attention":
        lines += [
            "for block in blocks:",
            "    attention = getattr(block, found.attention_name)",
            "    setattr(block, found.attention_name, Checkpointed(attention))",
        ]
    elif kind == "selective":
        lines.append(
            "blocks = [Checkpointed(block, context_fn=selective_contexts) for block in blocks]"
        )
    elif kind == "block":
        lines.append("blocks = [Checkpointed(block) for block in blocks]")
    elif kind in _EVERY:
        lines += [
            f"for index in range(0, len(blocks), {_EVERY[kind]}):",
            "    blocks[index] = Checkpointed(blocks[index])",
        ]
    if config.compile == "block":
        lines += [
            "for block in blocks:",
            "    block.compile(dynamic=False)  # includes the recomputation",
        ]
    if kind == "sqrt":
        lines += [
            "bounds = segment_bounds(len(blocks))",
            "segments = [Segment(blocks[start:end]) for start, end in itertools.pairwise(bounds)]",
            "blocks = [Checkpointed(segment) for segment in segments]",
        ]
    if not lines:
        return []
    replaces_blocks = kind not in ("none", "attention")
    if is_ours:
        lines.insert(0, "blocks = list(model.blocks)")
        if replaces_blocks:
            lines.append("model.blocks = nn.ModuleList(blocks)")
        return lines
    if replaces_blocks:
        lines.append("found.replace(blocks)")
    return [
        "found = find_blocks(model)",
        'assert found is not None, "the model has no list of blocks of one class"',
        "blocks = list(found.blocks)",
        *lines,
    ]


# -- the update ------------------------------------------------------------------------------------


def _optimizer(recipe: Recipe) -> list[Part]:
    config = recipe.config
    parts = [
        shipped(*technique_modules(config), *_checkpointing_modules(config)),
        _make_optimizer(recipe),
    ]
    if config.sharding == "zero1":
        parts.append(divide_state_part(_optimizer_of(config)))
    return [*parts, _update(recipe)]


def _make_optimizer(recipe: Recipe) -> Part:
    config = recipe.config
    settings: dict[str, object] = {"lr": "LEARNING_RATE"}
    if config.optimizer != "adafactor-fixed-rate":
        settings |= recipe.optimizer_settings
    settings |= optimizer_flags(config)
    name, import_class = imported_optimizer(config)
    arguments = "".join(f"        {setting}={value},\n" for setting, value in settings.items())
    return code(
        f"{import_class}\nimport torch\nfrom torch import nn\n\n"
        "def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:\n"
        f"    return {name}(\n        parameters,\n{arguments}    )"
    )


def _optimizer_of(config: TrainingConfig) -> str:
    """Return the expression that makes the optimizer of `parameters`."""
    if config.precision == "bf16-stochastic":
        return f"StochasticallyRounded(parameters, {_ROUNDING})"
    return "make_optimizer(parameters)"


def _update(recipe: Recipe) -> Part:
    optimizer = _optimizer_of(recipe.config)
    if recipe.config.sharding == "zero1":
        optimizer = "divide_state(parameters)"
    if recipe.config.optimizer_fusion == "backward":
        return code(_IN_BACKWARD.replace("OPTIMIZER", optimizer))
    scales = recipe.config.precision == "fp16-mixed"
    clipping = recipe.workload.gradient_clipping
    return code(_after_backward(optimizer, scales=scales, clipping=clipping))


_ROUNDING = "make_optimizer, learning_rate=LEARNING_RATE, seed=SEED"
_IN_BACKWARD = '''
from torch import Tensor, nn

class Updater:
    """Updates each parameter during the backward pass, as soon as its gradient is complete."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.optimizer = step_in_backward(OPTIMIZER)

    def set_learning_rate(self, learning_rate: float) -> None:
        set_learning_rate(self.optimizer, learning_rate)

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def step(self) -> None:
        self.optimizer.step()
'''


def _after_backward(optimizer: str, *, scales: bool, clipping: float | None) -> str:
    """Return the definition of `Updater`.

    `scales`: whether a scaler multiplies the loss, as float16 needs.
    """
    attributes = [f"self.optimizer = {optimizer}"]
    update = []
    if scales:
        attributes.append("self.scaler = torch.amp.GradScaler(DEVICE)")
    if clipping is not None:
        attributes.append("self.parameters = parameters")
        if scales:
            update.append("self.scaler.unscale_(self.optimizer)")
        update.append(f"nn.utils.clip_grad_norm_(self.parameters, {clipping}, foreach=False)")
    if scales:
        update += ["self.scaler.step(self.optimizer)", "self.scaler.update()"]
    else:
        update.append("self.optimizer.step()")
    update.append("self.optimizer.zero_grad(set_to_none=True)")
    imports = "import torch\n" if scales else ""
    imports += "from torch import Tensor, nn\n"
    init_body = "\n".join(f"        {line}" for line in attributes)
    step_body = "\n".join(f"        {line}" for line in update)
    return f'''
{imports}
class Updater:
    """Updates all parameters once the gradients of a global batch are complete."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
{init_body}

    def set_learning_rate(self, learning_rate: float) -> None:
        set_learning_rate(self.optimizer, learning_rate)

    def scale(self, loss: Tensor) -> Tensor:
        return {"self.scaler.scale(loss)" if scales else "loss"}

    def step(self) -> None:
{step_body}
'''
