"""One copy of the model on each device, by DistributedDataParallel."""

import torch
import torch._dynamo.config
import torch.distributed
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel


class GradientBuckets:
    """Adds up the gradients of all devices, a bucket at a time, and knows the buckets' memory.

    The gradients are views of the buckets of DistributedDataParallel.
    """

    def __init__(self, module: DistributedDataParallel, *, reduced_in: str) -> None:
        self.buffers: list[Tensor] = []
        """The buckets of the latest backward pass."""
        is_complete = True
        add_up = default_hooks.allreduce_hook
        if reduced_in == "bf16":
            add_up = default_hooks.bf16_compress_hook

        # torch compares annotations with its classes; in an exported file they are texts.
        def hook(group, bucket):  # type: ignore[no-untyped-def]
            nonlocal is_complete
            if is_complete:  # the buckets are built anew after the first step
                self.buffers.clear()
            self.buffers.append(bucket.buffer())
            is_complete = bucket.is_last()
            return add_up(group, bucket)

        module.register_comm_hook(module.process_group, hook)

        def forget_first_buckets(*_: object) -> None:
            # Those of the second step are allocated when it begins: all would be there twice.
            if self.buffers:
                self.buffers.clear()
                handle.remove()

        handle = module.register_forward_pre_hook(forget_first_buckets)


def replicate(
    model: nn.Module, *, mesh: DeviceMesh, device: torch.device
) -> DistributedDataParallel:
    # Otherwise torch would cut each compiled graph where a bucket ends, and save other activations.
    torch._dynamo.config.optimize_ddp = False
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        broadcast_buffers=False,
        init_sync=False,  # all have loaded the same weights
        process_group=mesh.get_group(),
        gradient_as_bucket_view=True,
    )
