"""Optimizers: torch's own, one of ours and one of torchao's.

Default learning rates: `autotune/spec/workload.py`.

| value | state per parameter | settings |
|---|---|---|
| adamw | 2 (arXiv:1711.05101) | betas 0.9, 0.999, weight decay 0.01 |
| adafactor | about 0: a row and a column (arXiv:1804.04235) | relative to the weight's size, eps 1.2e-7 and 1e-3 |
| sgd | 1 | momentum 0.9 |
| adafactor-fixed-rate | about 0: a row and a column | weight decay 0.01; `adafactor_fixed_rate.py` |
| adamw-8bit | 2 of one byte and a scale for 256 (arXiv:2110.02861) | as adamw, and its rate |

adamw-8bit needs torchao. Its update is compiled for every shape of a parameter, which takes its
time in the first step; what has fewer than 4,096 numbers, or no multiple of 256, keeps its state as
adamw does.

`foreach` and `fused` are always given: torch's own choice differs between devices. Source:
https://docs.pytorch.org/docs/stable/optim.html,
https://github.com/pytorch/ao/tree/main/torchao/optim
"""

from collections.abc import Iterable

import torch
from torch import nn

from autotune.spec.config import Optimizer, OptimizerFusion
from autotune.techniques.adafactor_fixed_rate import AdafactorFixedRate

SGD_MOMENTUM = 0.9
ADAFACTOR_EPS = (torch.finfo(torch.float32).eps, 1e-3)
"""torch's defaults for float32, for every dtype: it takes the first from the dtype of the weights,
which would make bf16-true another algorithm. (The paper's 1e-30 is squared in torch's code and
becomes 0: NaN for rows never seen.)"""


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    name: Optimizer,
    *,
    fusion: OptimizerFusion,
    learning_rate: float,
) -> torch.optim.Optimizer:
    foreach, fused = fusion == "foreach", fusion == "kernel"
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
            from torchao.optim import AdamW8bit

            optimizer: torch.optim.Optimizer = AdamW8bit(parameters, lr=learning_rate)
            return optimizer
