"""Recomputes, compiles or converts the transformer blocks of any model, as the trials of autotune do.

    from autotune_blocks import prepare_blocks
    prepare_blocks(model, checkpointing="every-2", compiled=True)

Call it once, after the weights are loaded and before an optimizer or a trainer gets the model.
Needs torch (and torchao for fp8) and nothing else: keep it beside your script. The blocks are the
longest list of modules of one class; name another with `path="model.layers"`. Names of parameters
stay what they are, but for checkpointing "sqrt".
"""

import itertools
import math
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_aten = torch.ops.aten
KEPT = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._grouped_mm.default,
        _aten._scaled_mm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""What `selective` keeps: matrix products and the attention kernels made of them."""
EVERY = {"block": 1, "every-2": 2, "every-4": 4}
"""Which blocks are recomputed: those whose index is divisible by this."""


class Segment(nn.Module):
    """Several blocks, one after the other, as one module; one may return a tuple with the next one's input first."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        output: Any = x
        for block in self.blocks:
            output = block(output[0] if isinstance(output, tuple) else output, *args, **kwargs)
        return output


def prepare_blocks(
    model: nn.Module,
    *,
    checkpointing: str = "none",
    compiled: bool = False,
    fp8: bool = False,
    path: str | None = None,
) -> None:
    """Changes the model in place, in the order that works.

    Raises ValueError where it has no such blocks.
    """
    path = find_blocks(model) if path is None else path
    if fp8:
        _convert_to_fp8(model.get_submodule(path))
    _checkpoint_in_blocks(model, path, checkpointing)
    if compiled:
        for block in _blocks(model, path):
            block.compile(dynamic=False)
    if (
        checkpointing == "sqrt"
    ):  # several compiled blocks in one segment, and not a segment in one graph
        _checkpoint_segments(model, path)


def find_blocks(model: nn.Module) -> str:
    """Path of the longest list of modules of one class that is inside no other list."""
    lists = _lists(model, "")
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no list of alike blocks: name it with path=..."
        )
    return max(lists, key=lambda path: len(list(model.get_submodule(path).children())))


def _lists(module: nn.Module, prefix: str) -> list[str]:
    found = []
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            found += [prefix + name] if len({type(block) for block in child}) == 1 else []
        elif isinstance(child, nn.Sequential) and _is_of_blocks(child):
            found.append(prefix + name)
        else:
            found += _lists(child, f"{prefix}{name}.")
    return found


def _is_of_blocks(modules: nn.Sequential) -> bool:
    """A feed-forward part is a sequence too, of modules without children."""
    return len({type(module) for module in modules}) == 1 and any(
        True for _ in modules[0].children()
    )


def _blocks(model: nn.Module, path: str) -> list[nn.Module]:
    return list(model.get_submodule(path).children())


def _replace(model: nn.Module, path: str, blocks: list[nn.Module]) -> None:
    is_sequence = isinstance(model.get_submodule(path), nn.Sequential)
    model.set_submodule(path, nn.Sequential(*blocks) if is_sequence else nn.ModuleList(blocks))


def _checkpoint_in_blocks(model: nn.Module, path: str, checkpointing: str) -> None:
    blocks = _blocks(model, path)
    if checkpointing == "attention":
        name = _attention_name(blocks)
        for block in blocks:
            setattr(block, name, _recomputed(getattr(block, name)))
    elif checkpointing == "selective":
        _replace(
            model, path, [_recomputed(block, context_fn=_selective_contexts) for block in blocks]
        )
    elif checkpointing in EVERY:
        every = EVERY[checkpointing]
        _replace(
            model, path, [b if index % every else _recomputed(b) for index, b in enumerate(blocks)]
        )
    elif checkpointing not in ("none", "sqrt"):
        raise ValueError(f"checkpointing {checkpointing!r} is not known")


def _checkpoint_segments(model: nn.Module, path: str) -> None:
    """Consecutive blocks in round(sqrt(layers)) segments of nearly equal length, each recomputed as a whole."""
    blocks = _blocks(model, path)
    segments = round(math.sqrt(len(blocks)))
    bounds = [round(index * len(blocks) / segments) for index in range(segments + 1)]
    _replace(
        model,
        path,
        [_recomputed(Segment(blocks[start:end])) for start, end in itertools.pairwise(bounds)],
    )


def _attention_name(blocks: list[nn.Module]) -> str:
    """The attribute of every block with attention in its name and matrices in it; a norm may be named after it."""
    for name, child in blocks[0].named_children():
        words = f"{name} {type(child).__name__}".lower()
        matrices = sum(parameter.dim() == 2 for parameter in child.parameters())
        if (
            ("attn" in words or "attention" in words)
            and matrices > 1
            and all(hasattr(b, name) for b in blocks)
        ):
            return name
    raise ValueError(f"no attention was found in {type(blocks[0]).__name__}")


def _recomputed(module: nn.Module, **options: Any) -> nn.Module:
    return checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **options)


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_matrix_products)


def _keep_matrix_products(
    _context: Any, operator: Any, *_args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _convert_to_fp8(blocks: nn.Module) -> None:
    """Every linear layer of a block whose sides are multiples of 16: what a product in fp8 wants."""
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(blocks, module_filter_fn=_can_be_fp8)


def _can_be_fp8(layer: nn.Module, _name: str) -> bool:
    return isinstance(layer, nn.Linear) and not (layer.in_features % 16 or layer.out_features % 16)
