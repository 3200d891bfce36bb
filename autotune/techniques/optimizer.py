"""Optimizers: three of torch, one of autotune, one of torchao and two of bitsandbytes.

Default learning rates are in `autotune/spec/learning_rates.py`.

| value | state per parameter | settings |
|---|---|---|
| adamw | 2 (arXiv:1711.05101) | betas 0.9, 0.999, weight decay 0.01 |
| adafactor | about 0: a row and a column (arXiv:1804.04235) | relative steps, eps 1.2e-7 and 1e-3 |
| sgd | 1 | momentum 0.9 |
| adafactor-fixed-rate | about 0 (`adafactor_fixed_rate.py`) | weight decay 0.01 |
| adamw-8bit | 2 of one byte and a scale for 256 (arXiv:2110.02861) | as adamw, and its rate |
| paged-adamw | 2 | as adamw, and its rate |
| paged-adamw-8bit | 2 of one byte and a scale for 256 | as adamw, and its rate |

adamw-8bit needs torchao. Its update is compiled for every shape of a parameter, which makes the
first step slow. Parameters with fewer than 4,096 elements, or with a number of elements that is not
a multiple of 256, have the same state as in adamw.

The paged optimizers, of bitsandbytes, have the state of parameters with 100,000 elements or more in
CUDA's managed memory, which the driver moves to the host page by page when the device is full
(arXiv:2305.14314). It does not count as memory of the device. On a CPU it is ordinary memory. In 8
bits, parameters with fewer than 4,096 elements have the same state as in adamw.

`foreach` and `fused` are always set: torch's defaults differ between devices. Source:
https://docs.pytorch.org/docs/stable/optim.html,
https://github.com/pytorch/ao/tree/main/torchao/optim
"""

from collections.abc import Iterable

import torch
from torch import nn

from autotune.shipped.adafactor_fixed_rate import AdafactorFixedRate
from autotune.spec.config import Optimizer, OptimizerFusion
from autotune.techniques.extras import bitsandbytes

SGD_MOMENTUM = 0.9
ADAFACTOR_EPS = (torch.finfo(torch.float32).eps, 1e-3)
"""torch's defaults for float32, used for every dtype. By default the first depends on the dtype of
the weights, which would make bf16-true a different algorithm. (The paper's 1e-30 is squared in
torch's code and becomes 0, which gives NaN for rows that never have a gradient.)"""


PAGED_ELEMENTS = 100_000
"""bitsandbytes has the state of parameters with fewer elements in ordinary memory. Source:
`Optimizer8bit.get_state_buffer`."""


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    name: Optimizer,
    *,
    fusion: OptimizerFusion,
    learning_rate: float,
) -> torch.optim.Optimizer:
    """Returns the optimizer, with the update that `fusion` selects."""
    foreach = fusion == "foreach"
    fused = fusion == "kernel"
    match name:
        case "adamw":
            return torch.optim.AdamW(parameters, lr=learning_rate, foreach=foreach, fused=fused)
        case "adafactor":
            return torch.optim.Adafactor(
                parameters, lr=learning_rate, eps=ADAFACTOR_EPS, foreach=foreach
            )
        case "sgd":
            return torch.optim.SGD(
                parameters, lr=learning_rate, momentum=SGD_MOMENTUM, foreach=foreach, fused=fused
            )
        case "adafactor-fixed-rate":
            assert fusion in ("none", "backward")
            return AdafactorFixedRate(parameters, lr=learning_rate)
        case "adamw-8bit":
            assert fusion in ("none", "backward")
            # An extra.
            from torchao.optim import AdamW8bit  # noqa: PLC0415

            optimizer: torch.optim.Optimizer = AdamW8bit(parameters, lr=learning_rate)
            return optimizer
        case "paged-adamw" | "paged-adamw-8bit":
            assert fusion in ("none", "backward")
            optimizers = bitsandbytes().optim
            is_in_8_bits = name == "paged-adamw-8bit"
            kind = optimizers.PagedAdamW8bit if is_in_8_bits else optimizers.PagedAdamW
            paged: torch.optim.Optimizer = kind(parameters, lr=learning_rate)
            return paged
