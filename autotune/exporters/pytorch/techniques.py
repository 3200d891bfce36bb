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
from autotune.exporters.pytorch.devices import divide_state_piece
from autotune.exporters.pytorch.pieces import Piece, piece, quoted_source
from autotune.exporters.recipe import Recipe
from autotune.exporters.script_lines import optimizer_flags
from autotune.exporters.source import STEP_IN_BACKWARD, STOCHASTIC_ROUNDING, spaced
from autotune.spec.config import TrainingConfig
from autotune.spec.model_choice import MODEL_NAMES

_TORCH = ("import torch", "from torch import Tensor, nn")
_ANY = "from typing import Any"
_CALLABLE = "from collections.abc import Callable, Iterable"
_AUTOCAST = {"bf16-mixed": "torch.bfloat16", "fp8": "torch.bfloat16", "fp16-mixed": "torch.float16"}
_EVERY = {"every-2": 2, "every-4": 4}


def autocast_dtype(config: TrainingConfig) -> str | None:
    """Return the dtype of autocast as an expression; None without autocast."""
    return _AUTOCAST.get(config.precision)


def technique_pieces(recipe: Recipe) -> list[Piece]:
    """Return the definitions of `apply_techniques(model)` and `Updater(parameters)`."""
    config = recipe.config
    return [_application(recipe), *_adapters(config), *_definitions(config), *_optimizer(recipe)]


def _adapters(config: TrainingConfig) -> list[Piece]:
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
    names = ["linear_layers", "is_transposed", "add_adapters", "draw_adapters"]
    imports = (
        *_TORCH,
        _ANY,
        "from collections.abc import Iterable",
        "from peft import LoraConfig, inject_adapter_in_model",
        "import math",
        "import zlib",
    )
    pieces = [piece(text, _ANY, "import torch"), *_quantization(config)]
    return [*pieces, quoted_source("exporters.shipped.adapters", *names, imports=imports)]


def _quantization(config: TrainingConfig) -> list[Piece]:
    """Return the definition of `quantize(model, layers)`, if the configuration needs it."""
    if not is_quantized(config):
        return []
    is_quantized_weight = quoted_source(
        "exporters.shipped.adapters", "is_quantized", imports=("from torch import Tensor",)
    )
    if config.base_weights == "nf4":
        quantize = piece(_IN_4_BITS, *_TORCH, "from bitsandbytes.nn import Linear4bit, Params4bit")
    else:
        name = torchao_class(config)
        quantize = piece(
            _BY_TORCHAO.replace("CONFIG", name),
            *_TORCH,
            f"from torchao.quantization import {name}, quantize_",
        )
    return [quantize, is_quantized_weight]


_BY_TORCHAO = '''
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


def _definitions(config: TrainingConfig) -> list[Piece]:
    pieces = []
    if config.loss == "chunked":
        names = (
            "LEAST_CHUNKS",
            "LEAST_TOKENS",
            "_chunked",
            "chunked_token_loss",
            "tokens_in_a_chunk",
        )
        checkpoint = (*_TORCH, "from torch.utils.checkpoint import checkpoint")
        pieces.append(quoted_source("techniques.loss", *names, imports=checkpoint))
    if config.precision == "fp8":
        pieces.append(_fp8())
    if config.checkpointing != "none":
        pieces.append(_checkpointing(config))
    if config.activation_offload == "cpu":
        parts = ("SMALLEST_BYTES", "OnHost", "offloaded", "_unpack", "to_host", "to_device")
        imports = (
            *_TORCH,
            _ANY,
            "from contextlib import AbstractContextManager, nullcontext",
            "from dataclasses import dataclass",
            "from torch.autograd.graph import saved_tensors_hooks",
        )
        offload = quoted_source("techniques.activation_offload", *parts, imports=imports)
        pieces.append(
            Piece(offload.text.replace("place: ActivationOffload", "place: str"), offload.imports)
        )
    return pieces


def _fp8() -> Piece:
    fp8 = quoted_source("techniques.fp8", "convert", "can_be_fp8", imports=_TORCH)
    lazy = "    from torchao.float8 import Float8LinearConfig, convert_to_float8_training\n\n"
    imports = fp8.imports | {
        "from torchao.float8 import Float8LinearConfig, convert_to_float8_training"
    }
    multiple = quoted_source("spec.config", "FP8_MULTIPLE")
    return Piece(f"{multiple.text}\n\n\n{fp8.text.replace(lazy, '')}", imports)


def _checkpointing(config: TrainingConfig) -> Piece:
    names = ["Checkpointed"]
    imports = {*_TORCH, _ANY, "from collections.abc import Callable"}
    checkpoint = {"checkpoint"}
    if config.checkpointing == "selective":
        names += ["_aten", "_KEPT_OPERATORS", "_selective_contexts", "_keep_matrix_products"]
        checkpoint |= {"CheckpointPolicy", "create_selective_checkpoint_contexts"}
    if config.checkpointing == "sqrt":
        names.append("Segment")
        imports |= {"import itertools", "import math"}
    imports.add(f"from torch.utils.checkpoint import {', '.join(sorted(checkpoint))}")
    checkpointing = quoted_source("techniques.checkpointing", *names, imports=imports)
    if config.checkpointing != "sqrt":
        return checkpointing
    bounds = quoted_source("spec.config", "segment_bounds")
    return Piece(spaced([checkpointing.text, bounds.text]), checkpointing.imports)


def _application(recipe: Recipe) -> Piece:
    config = recipe.config
    lines = [
        *_loss_lines(config),
        *_block_lines(config, is_ours=recipe.workload.model in MODEL_NAMES),
    ]
    if config.compile == "model":
        lines.append("model.compile(dynamic=False)  # last: the graph contains all of the above")
    if not lines:
        lines.append("# This configuration has no technique inside the model.")
    body = "\n".join(f"    {line}" for line in lines)
    return piece(
        f'''
def apply_techniques(model: Any) -> None:
    """Applies the techniques inside the model, in the order in which they work together."""
{body}
''',
        _ANY,
    )


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
            "blocks = [Checkpointed(block, context_fn=_selective_contexts) for block in blocks]"
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
        lines += [
            "container = type(found.blocks)",
            "is_list = isinstance(found.blocks, nn.ModuleList)",
            "replaced = container(blocks) if is_list else container(*blocks)",
            "setattr(found.owner, found.name, replaced)",
        ]
    return [
        "found = find_blocks(model)",
        'assert found is not None, "the model has no list of blocks of one class"',
        "blocks = list(found.blocks)",
        *lines,
    ]


# -- the update ------------------------------------------------------------------------------------


def _optimizer(recipe: Recipe) -> list[Piece]:
    config = recipe.config
    pieces = []
    if config.optimizer == "adafactor-fixed-rate":
        pieces.append(_fixed_rate())
    if config.precision == "bf16-stochastic":
        imports = (*_TORCH, _ANY, _CALLABLE, "from torch._subclasses.fake_tensor import FakeTensor")
        pieces.append(
            quoted_source("techniques.stochastic_rounding", *STOCHASTIC_ROUNDING, imports=imports)
        )
    if config.optimizer_fusion == "backward":
        imports = (
            *_TORCH,
            _ANY,
            "from collections import OrderedDict",
            "from collections.abc import Callable",
        )
        pieces.append(
            quoted_source("techniques.step_in_backward", *STEP_IN_BACKWARD, imports=imports)
        )
    pieces.append(_make_optimizer(recipe))
    if config.sharding == "zero1":
        pieces.append(divide_state_piece(_optimizer_of(config)))
    return [*pieces, _update(recipe)]


def _fixed_rate() -> Piece:
    names = (
        "WEIGHT_DECAY",
        "DECAY_RATE",
        "LARGEST_BETA2",
        "CLIP_THRESHOLD",
        "SQUARE_EPS",
        "AdafactorFixedRate",
    )
    functions = ("_update", "_initial_state", "_inverse_root", "_blend")
    return quoted_source(
        "techniques.adafactor_fixed_rate", *names, *functions, imports=(*_TORCH, _ANY, _CALLABLE)
    )


def _make_optimizer(recipe: Recipe) -> Piece:
    config = recipe.config
    settings: dict[str, object] = {"lr": "LEARNING_RATE"}
    if config.optimizer != "adafactor-fixed-rate":
        settings |= recipe.optimizer_settings
    settings |= optimizer_flags(config)
    name = _CLASSES[config.optimizer]
    arguments = "".join(f"        {setting}={value},\n" for setting, value in settings.items())
    imports = [_IMPORTS[config.optimizer]] if config.optimizer in _IMPORTS else []
    return piece(
        "def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:\n"
        f"    return {name}(\n        parameters,\n{arguments}    )",
        *_TORCH,
        *imports,
    )


_CLASSES = {
    "adamw": "torch.optim.AdamW",
    "adafactor": "torch.optim.Adafactor",
    "sgd": "torch.optim.SGD",
    "adafactor-fixed-rate": "AdafactorFixedRate",
    "adamw-8bit": "AdamW8bit",
    "paged-adamw": "PagedAdamW",
    "paged-adamw-8bit": "PagedAdamW8bit",
}
_IMPORTS = {
    "adamw-8bit": "from torchao.optim import AdamW8bit",
    "paged-adamw": "from bitsandbytes.optim import PagedAdamW",
    "paged-adamw-8bit": "from bitsandbytes.optim import PagedAdamW8bit",
}


def _optimizer_of(config: TrainingConfig) -> str:
    """Return the expression that makes the optimizer of `parameters`."""
    if config.precision == "bf16-stochastic":
        return f"StochasticallyRounded(parameters, {_ROUNDING})"
    return "make_optimizer(parameters)"


def _update(recipe: Recipe) -> Piece:
    optimizer = _optimizer_of(recipe.config)
    if recipe.config.sharding == "zero1":
        optimizer = "divide_state(parameters)"
    if recipe.config.optimizer_fusion == "backward":
        return piece(_IN_BACKWARD.replace("OPTIMIZER", optimizer), *_TORCH)
    scales = recipe.config.precision == "fp16-mixed"
    clipping = recipe.workload.gradient_clipping
    return piece(_after_backward(optimizer, scales=scales, clipping=clipping), *_TORCH)


_ROUNDING = "make_optimizer, learning_rate=LEARNING_RATE, seed=SEED"
_IN_BACKWARD = '''
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
    init_body = "\n".join(f"        {line}" for line in attributes)
    step_body = "\n".join(f"        {line}" for line in update)
    return f'''
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
