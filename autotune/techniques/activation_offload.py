"""Activation offload: activations are stored in pinned host memory between forward and backward.

| value | saves | costs |
|---|---|---|
| none | | |
| cpu | activations of more than 1 MiB until backward | copies both ways, host memory |

With checkpointing only the inputs of the blocks are saved for backward, and moved. A tensor that
several operators save is copied for each of them. The copies run on the stream of the computation,
in order with it: nothing is overwritten before it is copied, and nothing overlaps. Parameters are
not moved. Needs a device with separate memory. Source: torch.autograd.graph.save_on_cpu,
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
"""Smaller tensors stay on the device: their copy takes longer to start than to run."""


@dataclass(frozen=True)
class OnHost:
    """A tensor that is stored in the host's memory until the backward pass."""

    copy: Tensor
    device: torch.device
    stride: tuple[int, ...]
    """Strides on the device. Compiled code checks them."""


def offloaded(place: ActivationOffload, *, model: nn.Module) -> AbstractContextManager[object]:
    """Returns the context in which every forward pass must run."""
    if place == "none":
        return nullcontext()
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def pack(tensor: Tensor) -> object:
        is_small = tensor.numel() * tensor.element_size() < SMALLEST_BYTES
        # A matrix product saves a transposed view of its weight. That view has the same storage as
        # the parameter.
        if is_small or tensor.untyped_storage()._cdata in parameters:
            return tensor
        return to_host(tensor)

    return saved_tensors_hooks(pack, _unpack)


def _unpack(saved: Any) -> Tensor:
    return saved if isinstance(saved, Tensor) else to_device(saved)


def to_host(tensor: Tensor) -> OnHost:
    """Starts the copy of a tensor to the host and returns the copy."""
    # `empty_like` preserves the layout, but not the gaps in the memory of a slice.
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return OnHost(copy.copy_(tensor, non_blocking=tensor.is_cuda), tensor.device, tensor.stride())


def to_device(saved: OnHost) -> Tensor:
    """Starts the copy back to the device and returns it, with the original strides."""
    tensor = saved.copy.to(saved.device, non_blocking=saved.copy.is_pinned(), copy=True)
    is_expanded = 0 in saved.stride  # several elements share memory, so it cannot be written to
    if tensor.stride() == saved.stride or is_expanded:
        return tensor
    with_gaps = torch.empty_strided(
        tensor.shape, saved.stride, dtype=tensor.dtype, device=tensor.device
    )
    return with_gaps.copy_(tensor)


def pinned_bytes(size_bytes: int) -> int:
    """Returns the host memory that torch pins for a tensor: the next power of two, in bytes."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes > 0 else 0


def unavailable(place: ActivationOffload, *, device: torch.device) -> str | None:
    """Returns why offloading does not work on `device`; None if it does."""
    if place == "cpu" and device.type == "cpu":
        return "activations are in the host's memory already"
    return None
