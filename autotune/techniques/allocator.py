"""The CUDA caching allocator's segments: of fixed size, or expandable.

Expandable segments grow in place, so that less of what is reserved lies idle between tensors;
allocated memory does not change, reserved memory does, and reserved memory counts against the cap.
Source:
https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
"""

import os

import torch

from autotune.spec.config import Allocator

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable's name today and the one it had until torch 2.9."""


def set_allocator(allocator: Allocator) -> None:
    """Must be called before the process first allocates on the device: the setting is read once."""
    for variable in _VARIABLES:
        os.environ.pop(variable, None)
    if allocator == "expandable":
        os.environ[_VARIABLES[0]] = "expandable_segments:True"


def unavailable(allocator: Allocator, *, device: torch.device) -> str | None:
    if allocator == "expandable" and device.type != "cuda":
        return f"expandable segments belong to the CUDA allocator, the device is {device.type}"
    return None
