"""Gives a Trainer of Lightning our callback where its script does not, so that it is searched.

    trainer = Trainer(max_steps=100, accumulate_grad_batches=2)     # no line of ours
    trainer.fit(module, loader)

The callback is given when fitting begins. The sequences of a step are known once Lightning has
asked for the loader of the training data, which then yields the micro batches of the configuration.

Imports the Lightning that the script has loaded.
"""

import functools
import math
from types import ModuleType
from typing import Any

from autotune.errors import InvalidInput
from autotune.training.script import interface
from autotune.training.script.lightning import LightningCallback
from autotune.training.script.micro_batches import MicroBatches, split_batches

_CHANGE_STEPS = ("GradientAccumulationScheduler", "StochasticWeightAveraging")
"""Callbacks of Lightning that change how many batches a step has, during the training."""


def change(package: ModuleType) -> None:
    """Changes the class Trainer of the package, so that it gets the callback when it fits."""
    fit = package.Trainer.fit

    @functools.wraps(fit)
    def with_callback(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not interface.was_called():
            _check_strategy(self)
            self.callbacks.append(_InjectedCallback())
            for learner in interface.learners():
                learner.note_injected(f"its {type(self).__name__} gets autotune.LightningCallback")
        return fit(self, *args, **kwargs)

    package.Trainer.fit = with_callback


def _check_strategy(trainer: Any) -> None:
    """Raises InvalidInput for a strategy that splits the model, or trains in another process."""
    strategy = type(trainer.strategy).__name__
    if strategy != "SingleDeviceStrategy":
        raise InvalidInput(
            f"the Trainer has {strategy}, and a trial trains in one process, on one device",
            hint="write Trainer(devices=1), without strategy",
        )


class _InjectedCallback(LightningCallback):
    """The callback of a script that has no line of ours."""

    def __init__(self) -> None:
        self._begin()
        self._batches: MicroBatches | None = None

    def _prepare_steps(self, trainer: Any) -> None:
        for callback in trainer.callbacks:
            if type(callback).__name__ in _CHANGE_STEPS:
                raise InvalidInput(
                    f"the callback {type(callback).__name__} changes how many batches an optimizer "
                    "step has during the training",
                    hint="leave it out",
                )
        if trainer.overfit_batches or not trainer.limit_train_batches:
            raise InvalidInput(
                "the Trainer has overfit_batches, or limit_train_batches=0",
                hint="leave them out",
            )
        self._accumulated = trainer.accumulate_grad_batches
        self._limit = trainer.limit_train_batches
        trainer.val_check_interval = 1.0  # a trial validates once, after its last step
        source = trainer.fit_loop._data_source
        source.dataloader = functools.partial(self._loader, trainer, source.dataloader)

    def _loader(self, trainer: Any, request: Any) -> Any:
        """Returns the loader of the training data, which yields micro batches from now on."""
        loader = request()
        limit = self._limit
        if isinstance(limit, float):  # of all batches, as Lightning counts them
            limit = None if limit == 1.0 else int(len(loader) * limit)
        self._batches = split_batches(
            loader,
            accumulated=self._accumulated,
            set_by=f"accumulate_grad_batches {self._accumulated}",
            limit=limit,
        )
        self._config = interface.config_of_run(None)
        if self._batches is not None:
            trainer.accumulate_grad_batches = self._batches.accumulation
            trainer.limit_train_batches = 1.0
        return loader

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.fit_loop.setup_data()  # where configure_optimizers has not asked for it
        super().on_fit_start(trainer, pl_module)
        passes = trainer.accumulate_grad_batches
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step":  # counted in batches, at the end of each step
                steps = config.frequency // math.gcd(config.frequency, self._accumulated)
                config.frequency = steps * passes
        if self._batches is not None:
            pl_module.backward = functools.partial(self._backward, pl_module.backward)

    def _backward(self, backward: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
        backward(loss if self._weight == 1.0 else loss * self._weight, *args, **kwargs)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes how much the loss of the micro batch counts."""
        if self._batches is not None:
            self._weight = self._batches.parts.popleft().weight
