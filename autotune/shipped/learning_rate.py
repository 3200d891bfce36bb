"""Sets the learning rate of an optimizer."""

import torch
from torch import Tensor


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        # In torchao's optimizers it is a tensor, so that compiled code does not see a new number in
        # every step.
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
