"""Updates parameters after backward passes from a scaled loss, as float16 needs it."""

import torch
from torch import Tensor, nn

from autotune.shipped.learning_rate import set_learning_rate
from autotune.shipped.script.written import DEVICE, GRADIENT_CLIPPING, make_optimizer


class Updater:
    """Updates all parameters once the gradients of a global batch are complete."""

    def __init__(self, parameters: list[nn.Parameter], model: nn.Module) -> None:
        self.parameters = parameters
        self.optimizer = make_optimizer(parameters, model)
        self.scaler = torch.amp.GradScaler(DEVICE)

    def set_learning_rate(self, learning_rate: float) -> None:
        set_learning_rate(self.optimizer, learning_rate)

    def scale(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss)

    def step(self) -> None:
        if GRADIENT_CLIPPING is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, GRADIENT_CLIPPING, foreach=False)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
