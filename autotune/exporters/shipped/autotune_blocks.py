"""Checkpoints, compiles or shards the transformer blocks of a model, as trials of autotune do.

    from autotune_blocks import prepare_blocks, shard_blocks
    prepare_blocks(model, checkpointing="every-2", compiled=True)
    shard_blocks(model)  # on several devices, by FSDP2

Call each once, after the weights are loaded and before an optimizer or a trainer gets the model.
It needs only torch (and torchao for fp8): put it next to your script. The blocks are the longest
list of modules of one class; name another with `path="model.layers"`. The names of parameters do
not change, except with checkpointing "sqrt".
"""

import itertools
import math
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_aten = torch.ops.aten
SAVED_OPERATORS = frozenset(
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
"""Operators whose results `selective` saves: matrix products and attention kernels."""
EVERY = {"block": 1, "every-2": 2, "every-4": 4}
"""Blocks whose index is divisible by this number are recomputed."""


class Segment(nn.Module):
    """Several consecutive blocks as one module.

    A block may return a tuple; its first element is the input of the next block.
    """

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
    """Applies the techniques to `model` in place, in the order in which they work together.

    `path` names the list of blocks, such as "model.layers"; by default it is found by
    `find_blocks`. Raises ValueError if the model has no such blocks.
    """
    if path is None:
        path = find_blocks(model)
    if fp8:
        _convert_to_fp8(model.get_submodule(path))
    if checkpointing != "none":
        _stop_caching(model)
    _checkpoint_in_blocks(model, path, checkpointing)
    if compiled:
        for block in _blocks(model, path):
            block.compile(dynamic=False)
    if checkpointing == "sqrt":
        # After compiling, so that a segment holds compiled blocks and is not one graph itself.
        _checkpoint_segments(model, path)


def shard_blocks(model: nn.Module, *, path: str | None = None, **settings: Any) -> None:
    """Shares out the weights of `model` among the devices: each block by itself, then the rest.

    Call it after `prepare_blocks`, and make the optimizer after it. `settings` are those of
    `fully_shard_blocks`, `path` is that of `prepare_blocks`.
    """
    fully_shard_blocks(model, _blocks(model, path or find_blocks(model)), **settings)


def fully_shard_blocks(
    model: nn.Module,
    blocks: list[nn.Module],
    *,
    device: str = "cuda",
    group: int | None = None,
    reshard_after_forward: bool = True,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
) -> None:
    """Shares out the weights of each of the blocks, and of the rest of the model, by FSDP2.

    torch.distributed's process group must exist. `group`: how many devices share out one copy of
    the model; by default all do. Without `reshard_after_forward` a device has all weights from the
    forward to the backward pass.
    """
    ranks = torch.distributed.get_world_size()
    if group is None:
        mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("shards",))
    else:
        shape = (ranks // group, group)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("replicas", "shards"))
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    for module in [*blocks, model]:
        fully_shard(
            module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward
        )


def find_blocks(model: nn.Module) -> str:
    """Returns the path of the longest list of alike modules that is in no other list.

    Alike are modules of one class, or of classes with a common base that is not torch's. Raises
    ValueError if there is no such list.
    """
    paths = _block_list_paths(model, "")
    if not paths:
        raise ValueError(
            f"{type(model).__name__} has no list of blocks of one class: name it with path=..."
        )
    return max(paths, key=lambda path: len(_blocks(model, path)))


def _block_list_paths(module: nn.Module, prefix: str) -> list[str]:
    paths = []
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            if _are_alike(child):
                paths.append(prefix + name)
        elif isinstance(child, nn.Sequential) and _is_of_blocks(child):
            paths.append(prefix + name)
        else:
            paths += _block_list_paths(child, f"{prefix}{name}.")
    return paths


def _are_alike(modules: nn.ModuleList) -> bool:
    """Tells blocks of one class, or of classes with a common base, from other lists."""
    classes = {type(_unwrapped(module)) for module in modules}
    if len(classes) <= 1:
        return bool(classes)
    shared = set.intersection(*(set(one.__mro__) for one in classes))
    return any(issubclass(base, nn.Module) and not _is_of_torch(base) for base in shared)


def _unwrapped(module: nn.Module) -> nn.Module:
    """Returns the block inside of a block that is recomputed."""
    return module._checkpoint_wrapped_module if isinstance(module, CheckpointWrapper) else module


def _is_of_torch(base: type) -> bool:
    return base.__module__.partition(".")[0] == "torch"


def _is_of_blocks(modules: nn.Sequential) -> bool:
    """Tells blocks from the layers of a feed-forward part, which have no children."""
    has_one_class = len({type(module) for module in modules}) == 1
    return has_one_class and any(True for _ in modules[0].children())


def _blocks(model: nn.Module, path: str) -> list[nn.Module]:
    return list(model.get_submodule(path).children())


def _replace(model: nn.Module, path: str, blocks: list[nn.Module]) -> None:
    is_sequence = isinstance(model.get_submodule(path), nn.Sequential)
    model.set_submodule(path, nn.Sequential(*blocks) if is_sequence else nn.ModuleList(blocks))


def _stop_caching(model: nn.Module) -> None:
    """Turns off the cache of transformers' models, which recomputation would fill twice."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False


def _checkpoint_in_blocks(model: nn.Module, path: str, checkpointing: str) -> None:
    blocks = _blocks(model, path)
    if checkpointing == "attention":
        name = _attention_name(blocks)
        for block in blocks:
            setattr(block, name, _recomputed(getattr(block, name)))
    elif checkpointing == "selective":
        blocks = [_recomputed(block, context_fn=_selective_contexts) for block in blocks]
        _replace(model, path, blocks)
    elif checkpointing in EVERY:
        for index in range(0, len(blocks), EVERY[checkpointing]):
            blocks[index] = _recomputed(blocks[index])
        _replace(model, path, blocks)
    elif checkpointing not in ("none", "sqrt"):
        known = ", ".join(["none", "attention", "selective", *EVERY, "sqrt"])
        raise ValueError(f"Invalid checkpointing: {checkpointing!r}. Choose one of {known}.")


def segment_bounds(layers: int) -> list[int]:
    """Return where `sqrt` cuts the blocks: segment i has those from bounds[i] to bounds[i + 1].

    It makes round(sqrt(layers)) segments of nearly equal length.
    """
    segments = round(math.sqrt(layers))
    return [round(index * layers / segments) for index in range(segments + 1)]


def _checkpoint_segments(model: nn.Module, path: str) -> None:
    """Recomputes the blocks in round(sqrt(layers)) segments of nearly equal length."""
    blocks = _blocks(model, path)
    bounds = segment_bounds(len(blocks))
    parts = [Segment(blocks[start:end]) for start, end in itertools.pairwise(bounds)]
    _replace(model, path, [_recomputed(part) for part in parts])


def _attention_name(blocks: list[nn.Module]) -> str:
    """Returns the attribute of the blocks that is named after attention and has matrices.

    A norm may have attention in its name as well, but has no matrices.
    """
    for name, child in blocks[0].named_children():
        names = f"{name} {type(child).__name__}".lower()
        if "attn" not in names and "attention" not in names:
            continue
        matrices = sum(parameter.dim() == 2 for parameter in child.parameters())
        if matrices > 1 and all(hasattr(block, name) for block in blocks):
            return name
    raise ValueError(f"no attention module was found in {type(blocks[0]).__name__}")


def _recomputed(module: nn.Module, **options: Any) -> nn.Module:
    return checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **options)


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_matrix_products)


def _keep_matrix_products(
    _context: Any, operator: Any, *_args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE
        if operator in SAVED_OPERATORS
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def _convert_to_fp8(blocks: nn.Module) -> None:
    """Converts linear layers of the blocks whose two sizes are multiples of 16, as fp8 needs."""
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(blocks, module_filter_fn=_can_be_fp8)


def _can_be_fp8(layer: nn.Module, _name: str) -> bool:
    return isinstance(layer, nn.Linear) and not (layer.in_features % 16 or layer.out_features % 16)
