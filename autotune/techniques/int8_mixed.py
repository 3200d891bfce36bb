"""int8-mixed: matrix products of the blocks' linear layers in 8-bit integers.

Rows of activations, weights and gradients have one dynamic scale each, for all three products of a
layer; weights and their update stay in float32, everything else is as in bf16-mixed. Saves time on
tensor cores whose rate in int8 is twice that in 16 bits: from Turing on, so also where there is no
fast fp8. Costs the computation of the scales, which only compilation hides, and precision (8 bits
by row). The head, whose logits decide the loss, stays in bf16, and so do routers of mixtures
(`shipped/routers.py`, `studies/routers/`).

The scheme is that of torchao's prototype of quantized training, whose authors trained Llama2-1B on
an RTX 4090 with 29 instead of 17 thousand tokens per second, compiled. Theirs has a kernel in
Triton that applies the scales; ours is torch's product, which stores sums of 32 bits before. Not
measured on a GPU. Source: arXiv:2304.13013 (SwitchBack),
https://github.com/pytorch/ao/blob/main/torchao/prototype/quantized_training/README.md
"""

import torch
from torch import nn

from autotune.errors import first_line_of
from autotune.models.parts import ModelParts
from autotune.shipped.int8 import use_int8
from autotune.spec.config import Precision
from autotune.techniques.tried_layer import why_wrong


def convert_blocks(parts: ModelParts, precision: Precision) -> None:
    """Converts the linear layers of all blocks, for precision int8-mixed."""
    if precision == "int8-mixed":
        for block in parts.blocks:
            use_int8(block)


def unavailable(*, device: torch.device) -> str | None:
    """Returns why int8-mixed does not work on `device`; None if it does.

    It is found by a product, forward and backward.
    """
    try:
        layer = nn.Linear(64, 64, bias=False, device=device)
        use_int8(layer)
        return why_wrong(layer, layer.weight.detach())
    except (RuntimeError, NotImplementedError) as error:
        return first_line_of(error)
