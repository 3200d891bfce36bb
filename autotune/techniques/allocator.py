"""Segments of the CUDA caching allocator: of fixed size, or expandable.

Expandable segments grow in place, so that less reserved memory is unused between tensors. They do
not change the allocated memory but the reserved memory, which counts against the cap.
Source:
https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
"""

import os

import torch

from autotune.spec.config import Allocator

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable's name today and the one it had until torch 2.9."""


def set_allocator(allocator: Allocator) -> None:
    """Sets the kind of segments. Must be called before the first allocation on the device."""
    for variable in _VARIABLES:
        os.environ.pop(variable, None)
    if allocator == "expandable":
        os.environ[_VARIABLES[0]] = "expandable_segments:True"


def unavailable(allocator: Allocator, *, device: torch.device) -> str | None:
    """Returns why this setting does not work on `device`; None if it does."""
    if allocator == "expandable" and device.type != "cuda":
        return f"expandable segments belong to the CUDA allocator, the device is {device.type}"
    return None
