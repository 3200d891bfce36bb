"""Segments of the CUDA caching allocator: of fixed size, or expandable.

Expandable segments grow in place, so that less reserved memory is unused between tensors. They do
not change the allocated memory but the reserved memory, which counts against the cap. Every other
setting of a user's PYTORCH_ALLOC_CONF, such as max_split_size_mb and garbage_collection_threshold,
is kept in all trials: they are ways to reserve less, too, and are not searched beside these.
Source:
https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
"""

import torch

from autotune.spec.config import Allocator
from autotune.system.allocator_settings import set_segments


def set_allocator(allocator: Allocator) -> None:
    """Sets the kind of segments. Must be called before the first allocation on the device."""
    set_segments(expandable=allocator == "expandable")


def unavailable(allocator: Allocator, *, device: torch.device) -> str | None:
    """Returns why this setting does not work on `device`; None if it does."""
    if allocator == "expandable" and device.type != "cuda":
        return f"expandable segments belong to the CUDA allocator, the device is {device.type}"
    return None
