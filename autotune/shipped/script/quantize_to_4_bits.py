"""Stores frozen weights in 4 bits, by bitsandbytes."""

from typing import Any

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn

from autotune.shipped.script.written import DEVICE, WEIGHTS_DTYPE


@torch.no_grad()
def quantize(model: Any, layers: list[str]) -> None:
    """Stores the weights of these layers in 4 bits, one after the other on the device."""
    kind: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": True}
    for path in layers:
        layer = model.get_submodule(path)
        if isinstance(layer, nn.Linear):
            sizes = (layer.in_features, layer.out_features, layer.bias is not None)
            four_bit = Linear4bit(*sizes, compute_dtype=WEIGHTS_DTYPE, device="meta", **kind)
            weight = layer.weight.to(WEIGHTS_DTYPE)
            four_bit.weight = Params4bit(weight, requires_grad=False, **kind).to(DEVICE)
            four_bit.bias = layer.bias
            four_bit.support_avx512bf16_for_cpu = False  # it would rearrange weights to evaluate
            owner, _, name = path.rpartition(".")
            setattr(model.get_submodule(owner), name, four_bit)
    model.is_loaded_in_4bit = True  # peft looks for it
