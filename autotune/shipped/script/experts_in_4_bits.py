"""Stores weights of experts in 4 bits, by bitsandbytes."""

import torch
from bitsandbytes.functional import quantize_4bit
from torch import nn

from autotune.shipped.script.written import DEVICE, WEIGHTS_DTYPE


@torch.no_grad()
def quantize_experts(model: nn.Module, weights: list[str]) -> None:
    """Stores these weights in 4 bits, one after the other on the device."""
    for path in weights:
        weight = model.get_parameter(path).to(WEIGHTS_DTYPE).to(DEVICE)
        codes, state = quantize_4bit(
            weight, blocksize=64, compress_statistics=True, quant_type="nf4"
        )
        stored = nn.Parameter(codes, requires_grad=False)
        stored.quant_state = state  # type: ignore[attr-defined]
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, stored)
