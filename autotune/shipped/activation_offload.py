"""Stores activations in pinned host memory between forward and backward."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

SMALLEST_BYTES = 1024**2
"""Smaller tensors stay on the device: their copy takes longer to start than to run."""


@dataclass(frozen=True)
class OnHost:
    """A tensor that is stored in the host's memory until the backward pass."""

    copy: Tensor
    device: torch.device
    stride: tuple[int, ...]
    """Strides on the device. Compiled code checks them."""


def offloaded(model: nn.Module) -> AbstractContextManager[object]:
    """Returns the context in which every forward pass must run."""
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def pack(tensor: Tensor) -> object:
        is_small = tensor.numel() * tensor.element_size() < SMALLEST_BYTES
        # A matrix product saves a transposed view of its weight. That view has the same storage as
        # the parameter.
        if is_small or tensor.untyped_storage()._cdata in parameters:
            # Not itself: what an operator keeps of its own result would keep the operator in turn,
            # and a graph without a backward pass would stay for ever.
            return tensor.detach()
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
