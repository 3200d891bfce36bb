"""Every technique in an exported script: autotune's own definitions, and the lines that apply them.

The order is that of `autotune/techniques/__init__.py`. What a configuration does not use is not
there.
"""

from autotune.exporters.pytorch.pieces import Piece, own_source, piece
from autotune.exporters.recipe import Recipe
from autotune.exporters.script_lines import optimizer_flags
from autotune.exporters.source import STEP_IN_BACKWARD, STOCHASTIC_ROUNDING
from autotune.spec.config import TrainingConfig
from autotune.spec.model_choice import MODEL_NAMES

_TORCH = ("import torch", "from torch import Tensor, nn")
_ANY = "from typing import Any"
_CALLABLE = "from collections.abc import Callable, Iterable"
_AUTOCAST = {"bf16-mixed": "torch.bfloat16", "fp8": "torch.bfloat16", "fp16-mixed": "torch.float16"}
_EVERY = {"block": 1, "every-2": 2, "every-4": 4}


def weights_dtype(config: TrainingConfig) -> str:
    return (
        "torch.bfloat16"
        if config.precision in ("bf16-true", "bf16-stochastic")
        else "torch.float32"
    )


def autocast_dtype(config: TrainingConfig) -> str | None:
    return _AUTOCAST.get(config.precision)


def technique_pieces(recipe: Recipe) -> list[Piece]:
    """`apply_techniques(model)` with what it is made of, and `Updater(parameters)`."""
    config = recipe.config
    return [_application(recipe), *_definitions(config), *_optimizer(recipe)]


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
        pieces.append(own_source("techniques.loss", *names, imports=checkpoint))
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
        offload = own_source("techniques.activation_offload", *parts, imports=imports)
        pieces.append(
            Piece(offload.text.replace("place: ActivationOffload", "place: str"), offload.imports)
        )
    return pieces


def _fp8() -> Piece:
    fp8 = own_source("techniques.fp8", "convert", "can_be_fp8", imports=_TORCH)
    lazy = "    from torchao.float8 import Float8LinearConfig, convert_to_float8_training\n\n"
    imports = fp8.imports | {
        "from torchao.float8 import Float8LinearConfig, convert_to_float8_training"
    }
    multiple = own_source("spec.config", "FP8_MULTIPLE")
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
    return own_source("techniques.checkpointing", *names, imports=imports)


def _application(recipe: Recipe) -> Piece:
    config = recipe.config
    lines = [
        *_loss_lines(config),
        *_block_lines(config, is_ours=recipe.workload.model in MODEL_NAMES),
    ]
    if config.compile == "model":
        lines.append(
            "model.compile(dynamic=False)  # last: all of the above is inside its one graph"
        )
    body = (
        "\n".join(f"    {line}" if line else "" for line in lines)
        or "    # Nothing: this configuration has none."
    )
    return piece(
        f'''
def apply_techniques(model: Any) -> None:
    """Everything that stands inside the model, in this order."""
{body}
''',
        _ANY,
    )


def _loss_lines(config: TrainingConfig) -> list[str]:
    return ["model.token_loss = chunked_token_loss"] if config.loss == "chunked" else []


def _block_lines(config: TrainingConfig, *, is_ours: bool) -> list[str]:
    lines = []
    if config.precision == "fp8":
        lines += [
            "# Before anything wraps a block, so that what recomputes or compiles it meets these layers."
        ]
        lines += ["for block in blocks:", "    convert(block)"]
    kind = config.checkpointing
    if kind == "attention":
        lines += ["for block in blocks:"]
        lines += [
            "    block.attention = Checkpointed(block.attention)"
            if is_ours
            else "    setattr(block, found.attention_name, Checkpointed(getattr(block, found.attention_name)))"
        ]
    elif kind == "selective":
        lines += [
            "blocks = [Checkpointed(block, context_fn=_selective_contexts) for block in blocks]"
        ]
    elif _EVERY.get(kind) == 1:
        lines += ["blocks = [Checkpointed(block) for block in blocks]"]
    elif kind in _EVERY:
        condition = f"index % {_EVERY[kind]} == 0"
        lines += [
            f"blocks = [Checkpointed(block) if {condition} else block for index, block in enumerate(blocks)]"
        ]
    if config.compile == "block":
        lines += [
            "for block in blocks:",
            "    block.compile(dynamic=False)  # with what it recomputes",
        ]
    if kind == "sqrt":
        lines += [
            "segments = round(math.sqrt(len(blocks)))",
            "bounds = [round(index * len(blocks) / segments) for index in range(segments + 1)]",
            "blocks = [Checkpointed(Segment(blocks[start:end])) for start, end in itertools.pairwise(bounds)]",
        ]
    if not lines:
        return []
    replaces = kind not in ("none", "attention")
    if is_ours:
        return [
            "blocks = list(model.blocks)",
            *lines,
            *(["model.blocks = nn.ModuleList(blocks)"] if replaces else []),
        ]
    held = "type(found.blocks)(blocks) if isinstance(found.blocks, nn.ModuleList) else type(found.blocks)(*blocks)"
    return [
        "found = find_blocks(model)",
        'assert found is not None, "no list of alike blocks was found in the model"',
        "blocks = list(found.blocks)",
        *lines,
        *([f"held = {held}", "setattr(found.owner, found.name, held)"] if replaces else []),
    ]


# -- the update ------------------------------------------------------------------------------------


def _optimizer(recipe: Recipe) -> list[Piece]:
    config, pieces = recipe.config, []
    if config.optimizer == "adafactor-fixed-rate":
        pieces.append(_fixed_rate())
    if config.precision == "bf16-stochastic":
        imports = (*_TORCH, _ANY, _CALLABLE, "from torch._subclasses.fake_tensor import FakeTensor")
        pieces.append(
            own_source("techniques.stochastic_rounding", *STOCHASTIC_ROUNDING, imports=imports)
        )
    if config.optimizer_fusion == "backward":
        imports = (
            *_TORCH,
            _ANY,
            "from collections import OrderedDict",
            "from collections.abc import Callable",
        )
        pieces.append(own_source("techniques.step_in_backward", *STEP_IN_BACKWARD, imports=imports))
    return [*pieces, _make_optimizer(recipe), _update(recipe)]


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
    return own_source(
        "techniques.adafactor_fixed_rate", *names, *functions, imports=(*_TORCH, _ANY, _CALLABLE)
    )


def _make_optimizer(recipe: Recipe) -> Piece:
    config = recipe.config
    said = {} if config.optimizer == "adafactor-fixed-rate" else dict(recipe.optimizer_settings)
    said = {"lr": "LEARNING_RATE", **said, **optimizer_flags(config)}
    name = _CLASSES[config.optimizer]
    arguments = "".join(f"        {setting}={value},\n" for setting, value in said.items())
    imports = ["from torchao.optim import AdamW8bit"] if config.optimizer == "adamw-8bit" else []
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
}


def _update(recipe: Recipe) -> Piece:
    rounded = recipe.config.precision == "bf16-stochastic"
    everything = (
        f"StochasticallyRounded(parameters, {_ROUNDING})"
        if rounded
        else "make_optimizer(parameters)"
    )
    if recipe.config.optimizer_fusion == "backward":
        return piece(_IN_BACKWARD.replace("EVERYTHING", everything), *_TORCH)
    scaler = "torch.amp.GradScaler(DEVICE)" if recipe.config.precision == "fp16-mixed" else ""
    clipping = recipe.workload.gradient_clipping
    return piece(_after_backward(everything, scaler=scaler, clipping=clipping), *_TORCH)


_ROUNDING = "make_optimizer, learning_rate=LEARNING_RATE, seed=SEED"
_IN_BACKWARD = '''
class Updater:
    """Updates each parameter during the backward pass, as soon as its gradient is complete."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.optimizer = step_in_backward(EVERYTHING)

    def set_learning_rate(self, learning_rate: float) -> None:
        set_learning_rate(self.optimizer, learning_rate)

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def step(self) -> None:
        self.optimizer.step()
'''


def _after_backward(everything: str, *, scaler: str, clipping: float | None) -> str:
    clip = []
    if clipping is not None:
        clip += ["self.scaler.unscale_(self.optimizer)"] if scaler else []
        clip += [f"nn.utils.clip_grad_norm_(self.parameters, {clipping}, foreach=False)"]
    step = (
        ["self.scaler.step(self.optimizer)", "self.scaler.update()"]
        if scaler
        else ["self.optimizer.step()"]
    )
    body = "\n".join(
        f"        {line}" for line in [*clip, *step, "self.optimizer.zero_grad(set_to_none=True)"]
    )
    made = "\n".join(
        f"        {line}"
        for line in [
            f"self.optimizer = {everything}",
            *([f"self.scaler = {scaler}"] if scaler else []),
            *(["self.parameters = parameters"] if clipping is not None else []),
        ]
    )
    return f'''
class Updater:
    """Updates all parameters once the gradients of a global batch are complete."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
{made}

    def set_learning_rate(self, learning_rate: float) -> None:
        set_learning_rate(self.optimizer, learning_rate)

    def scale(self, loss: Tensor) -> Tensor:
        return {"self.scaler.scale(loss)" if scaler else "loss"}

    def step(self) -> None:
{body}
'''
