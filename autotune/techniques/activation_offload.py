"""Activation offload: what forward keeps for backward waits in pinned memory of the host.

| value | saves | costs |
|---|---|---|
| none | | |
| cpu | activations of more than 1 MiB, between forward and backward | copies both ways, memory of the host |

With checkpointing it moves what that keeps, the inputs of the blocks. A tensor that several
operators keep is copied for each of them. The copies run on the stream of the computation, ordered
with it: nothing is overwritten before it is copied, and nothing overlaps. Parameters stay where
they are. Needs a device with a memory of its own. Source: torch.autograd.graph.save_on_cpu,
https://docs.pytorch.org/docs/stable/autograd.html
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from autotune.spec.config import ActivationOffload

SMALLEST_BYTES = 1024**2
"""What is smaller stays: a copy takes longer to start than to run."""


@dataclass(frozen=True)
class OnHost:
    """A tensor that waits in the host's memory."""

    copy: Tensor
    device: torch.device
    stride: tuple[int, ...]
    """Layout on the device. Compiled code checks it."""


def offloaded(place: ActivationOffload, *, model: nn.Module) -> AbstractContextManager[object]:
    """The context of every forward pass."""
    if place == "none":
        return nullcontext()
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def pack(tensor: Tensor) -> object:
        is_small = tensor.numel() * tensor.element_size() < SMALLEST_BYTES
        # A product keeps a transposed view of its weight, which is the parameter's storage all the
        # same.
        if is_small or tensor.untyped_storage()._cdata in parameters:
            return tensor
        return to_host(tensor)

    return saved_tensors_hooks(pack, _unpack)


def _unpack(kept: Any) -> Tensor:
    return kept if isinstance(kept, Tensor) else to_device(kept)


def to_host(tensor: Tensor) -> OnHost:
    # Without the gaps between the numbers of a slice, else in the layout that it has.
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return OnHost(copy.copy_(tensor, non_blocking=tensor.is_cuda), tensor.device, tensor.stride())


def to_device(kept: OnHost) -> Tensor:
    tensor = kept.copy.to(kept.device, non_blocking=kept.copy.is_pinned(), copy=True)
    if (
        tensor.stride() == kept.stride or 0 in kept.stride
    ):  # no copy can be written to what was expanded
        return tensor
    with_gaps = torch.empty_strided(
        tensor.shape, kept.stride, dtype=tensor.dtype, device=tensor.device
    )
    return with_gaps.copy_(tensor)


def pinned_bytes(size_bytes: int) -> int:
    """Returns the bytes of the host that torch pins for a tensor of that size: the next power of two."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes > 0 else 0


def unavailable(place: ActivationOffload, *, device: torch.device) -> str | None:
    if place == "cpu" and device.type == "cpu":
        return "activations are in the host's memory already"
    return None
