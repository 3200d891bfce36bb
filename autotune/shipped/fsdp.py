"""Shares out the weights of a model among devices, by FSDP2."""

from collections.abc import Sequence

import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from autotune.shipped.segment import SEGMENT


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
    """Shares out the weights of each block or segment, and of the rest of the model, by FSDP2.

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
    for modules in [*sharded_units(blocks), [model]]:
        fully_shard(
            modules, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward
        )


def sharded_units(blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Returns the blocks, those that are recomputed together in one list."""
    units: dict[int, list[nn.Module]] = {}
    for block in blocks:
        segment, _ = getattr(block, SEGMENT, (block, 0))
        units.setdefault(id(segment), []).append(block)
    return list(units.values())
