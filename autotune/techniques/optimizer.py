"""Optimizers: torch's own, each with its own default learning rate (`autotune/workload.py`).

| value | state per parameter | settings |
|---|---|---|
| adamw | 2 (arXiv:1711.05101) | betas 0.9, 0.999, weight decay 0.01 |
| adafactor | about 0: a row and a column (arXiv:1804.04235) | torch's: update relative to the weight's size |
| sgd | 1 | momentum 0.9 |

`foreach` and `fused` are always given: torch's own choice differs between devices.
Source: https://docs.pytorch.org/docs/stable/optim.html
"""

from collections.abc import Iterable

import torch
from torch import nn

from autotune.config import Optimizer, OptimizerFusion

SGD_MOMENTUM = 0.9


def make_optimizer(
    parameters: Iterable[nn.Parameter], name: Optimizer, *, fusion: OptimizerFusion, learning_rate: float
) -> torch.optim.Optimizer:
    foreach, fused = fusion == "foreach", fusion == "kernel"
    match name:
        case "adamw":
            return torch.optim.AdamW(parameters, lr=learning_rate, foreach=foreach, fused=fused)
        case "adafactor":
            return torch.optim.Adafactor(parameters, lr=learning_rate, foreach=foreach)
        case "sgd":
            return torch.optim.SGD(parameters, lr=learning_rate, momentum=SGD_MOMENTUM, foreach=foreach, fused=fused)
