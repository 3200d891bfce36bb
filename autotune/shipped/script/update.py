"""Updates parameters after the backward passes of a global batch."""

from torch import Tensor, nn

from autotune.shipped.learning_rate import set_learning_rate
from autotune.shipped.script.written import GRADIENT_CLIPPING, make_optimizer


class Updater:
    """Updates all parameters once the gradients of a global batch are complete."""

    def __init__(self, parameters: list[nn.Parameter], model: nn.Module) -> None:
        self.parameters = parameters
        self.optimizer = make_optimizer(parameters, model)

    def set_learning_rate(self, learning_rate: float) -> None:
        set_learning_rate(self.optimizer, learning_rate)

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def step(self) -> None:
        if GRADIENT_CLIPPING is not None:
            nn.utils.clip_grad_norm_(self.parameters, GRADIENT_CLIPPING, foreach=False)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
