"""Shares out the weights of a model among devices, by FSDP2."""

import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


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
