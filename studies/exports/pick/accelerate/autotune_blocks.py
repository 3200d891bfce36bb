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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

Blocks = nn.ModuleList | nn.Sequential


@dataclass(frozen=True, kw_only=True)
class BlockList:
    """The list of transformer blocks that the module `owner` has under `name`."""

    owner: nn.Module
    name: str

    @property
    def blocks(self) -> Blocks:
        """The blocks that are there now."""
        blocks = getattr(self.owner, self.name)
        assert isinstance(blocks, nn.ModuleList | nn.Sequential)
        return blocks

    def replace(self, blocks: list[nn.Module]) -> None:
        """Put `blocks` in place of the list, into a list of the same type."""
        is_sequence = isinstance(self.blocks, nn.Sequential)
        replacement = nn.Sequential(*blocks) if is_sequence else nn.ModuleList(blocks)
        setattr(self.owner, self.name, replacement)

    @property
    def attention_name(self) -> str | None:
        """Name of the attribute of each block that is its attention; None if there is none."""
        for name, child in self.blocks[0].named_children():
            names = f"{name} {type(child).__name__}".lower()
            if "attn" not in names and "attention" not in names:
                continue
            matrices = sum(parameter.dim() == 2 for parameter in child.parameters())
            # A norm may also have attention in its name, but has no matrices.
            if matrices > 1 and all(hasattr(block, name) for block in self.blocks):
                return name
        return None


def find_blocks(model: nn.Module) -> BlockList | None:
    """Return the longest list of alike modules; None if there is no such list."""
    return max(_block_lists(model), key=lambda candidate: len(candidate.blocks), default=None)


def _block_lists(module: nn.Module) -> Iterator[BlockList]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            if _are_alike(child):
                yield BlockList(owner=module, name=name)
        elif isinstance(child, nn.Sequential) and _is_of_blocks(child):
            yield BlockList(owner=module, name=name)
        else:
            yield from _block_lists(child)


def _are_alike(modules: nn.ModuleList) -> bool:
    """Whether all modules have one class, or classes with a common base that is not torch's."""
    classes = {type(_unwrapped(module)) for module in modules}
    if len(classes) <= 1:
        return bool(classes)
    shared = set.intersection(*(set(one.__mro__) for one in classes))
    return any(issubclass(base, nn.Module) and not _is_of_torch(base) for base in shared)


def _unwrapped(module: nn.Module) -> Any:
    """Return the block inside of a block that torch's CheckpointWrapper recomputes."""
    return getattr(module, "_checkpoint_wrapped_module", module)


def _is_of_torch(base: type) -> bool:
    return base.__module__.partition(".")[0] == "torch"


def _is_of_blocks(modules: nn.Sequential) -> bool:
    """Whether all modules have one class and children, unlike the layers of a feed-forward."""
    has_one_class = len({type(module) for module in modules}) == 1
    return has_one_class and any(True for _ in modules[0].children())


FP8_MULTIPLE = 16
"""Both dimensions of every matrix in an fp8 product must be multiples of this."""


def convert(module: nn.Module, *, emulate: bool = False) -> nn.Module:
    """Makes the suitable linear layers of `module` use fp8; parameters stay the same objects."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    converted: nn.Module = convert_to_float8_training(
        module,
        config=Float8LinearConfig(emulate=emulate),
        module_filter_fn=lambda layer, _name: can_be_fp8(layer),
    )
    return converted


def can_be_fp8(layer: nn.Module) -> bool:
    """Returns whether it is a linear layer with sides that are multiples of FP8_MULTIPLE."""
    if not isinstance(layer, nn.Linear):
        return False
    return layer.in_features % FP8_MULTIPLE == 0 and layer.out_features % FP8_MULTIPLE == 0


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


def stop_caching(model: nn.Module) -> None:
    """Turns off the cache of keys and values that transformers' models fill in each forward pass.

    A block that is recomputed would add to the cache a second time: the cache would hold twice the
    keys and values, and `selective` would meet operators that were not in the forward pass.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False


def segment_bounds(layers: int) -> list[int]:
    """Return where `sqrt` cuts the blocks: segment i has those from bounds[i] to bounds[i + 1].

    It makes round(sqrt(layers)) segments of nearly equal length.
    """
    segments = round(math.sqrt(layers))
    return [round(index * layers / segments) for index in range(segments + 1)]


class Segment(nn.Module):
    """Several consecutive blocks as one module.

    A block may return a tuple whose first element is the input of the next block.
    """

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        output: Any = x
        for block in self.blocks:
            output = block(output[0] if isinstance(output, tuple) else output, *args, **kwargs)
        return output


_aten = torch.ops.aten
_KEPT_OPERATORS = frozenset(
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
"""The operators whose results `selective` stores: matrix products and attention kernels."""


def selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_matrix_products)


def _keep_matrix_products(
    _context: Any, operator: Any, *_args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    if operator in _KEPT_OPERATORS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


EVERY = {"block": 1, "every-2": 2, "every-4": 4}
"""Blocks whose index is divisible by this number are recomputed."""


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
    found = _block_list(model, path)
    if fp8:
        for block in found.blocks:
            convert(block)
    if checkpointing != "none":
        stop_caching(model)
    _checkpoint_in_blocks(found, checkpointing)
    if compiled:
        for block in found.blocks:
            block.compile(dynamic=False)
    if checkpointing == "sqrt":
        # After compiling, so that a segment holds compiled blocks and is not one graph itself.
        _checkpoint_segments(found)


def shard_blocks(model: nn.Module, *, path: str | None = None, **settings: Any) -> None:
    """Shares out the weights of `model` among the devices: each block by itself, then the rest.

    Call it after `prepare_blocks`, and make the optimizer after it. `settings` are those of
    `fully_shard_blocks`, `path` is that of `prepare_blocks`.
    """
    fully_shard_blocks(model, list(_block_list(model, path).blocks), **settings)


def _block_list(model: nn.Module, path: str | None) -> BlockList:
    """Returns the blocks at `path`, or else those that are found. Raises ValueError for none."""
    if path is not None:
        owner, _, name = path.rpartition(".")
        return BlockList(owner=model.get_submodule(owner), name=name)
    found = find_blocks(model)
    if found is None:
        raise ValueError(
            f"{type(model).__name__} has no list of blocks of one class: name it with path=..."
        )
    return found


def _checkpoint_in_blocks(found: BlockList, checkpointing: str) -> None:
    blocks = list(found.blocks)
    if checkpointing == "attention":
        name = found.attention_name
        if name is None:
            raise ValueError(f"no attention module was found in {type(blocks[0]).__name__}")
        for block in blocks:
            setattr(block, name, _recomputed(getattr(block, name)))
    elif checkpointing == "selective":
        found.replace([_recomputed(block, context_fn=selective_contexts) for block in blocks])
    elif checkpointing in EVERY:
        for index in range(0, len(blocks), EVERY[checkpointing]):
            blocks[index] = _recomputed(blocks[index])
        found.replace(blocks)
    elif checkpointing not in ("none", "sqrt"):
        known = ", ".join(["none", "attention", "selective", *EVERY, "sqrt"])
        raise ValueError(f"Invalid checkpointing: {checkpointing!r}. Choose one of {known}.")


def _checkpoint_segments(found: BlockList) -> None:
    """Recomputes the blocks in round(sqrt(layers)) segments of nearly equal length."""
    blocks = list(found.blocks)
    bounds = segment_bounds(len(blocks))
    found.replace(
        [_recomputed(Segment(blocks[start:end])) for start, end in itertools.pairwise(bounds)]
    )


def _recomputed(module: nn.Module, **options: Any) -> nn.Module:
    return checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **options)
