"""Updates parameters during the backward pass."""

from torch import Tensor, nn

from autotune.shipped.learning_rate import set_learning_rate
from autotune.shipped.script.written import make_optimizer
from autotune.shipped.step_in_backward import step_in_backward


class Updater:
    """Updates each parameter during the backward pass, as soon as its gradient is complete."""

    def __init__(self, parameters: list[nn.Parameter], model: nn.Module) -> None:
        self.optimizer = step_in_backward(make_optimizer(parameters, model))

    def set_learning_rate(self, learning_rate: float) -> None:
        set_learning_rate(self.optimizer, learning_rate)

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def step(self) -> None:
        self.optimizer.step()
