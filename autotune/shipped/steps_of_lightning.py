"""The events of a callback of Lightning that tell a `Promise` the steps of a training."""

from collections.abc import Mapping
from typing import Any

from autotune.shipped.promise import Promise


class StepsOfLightning:
    """Makes the `Promise` of `trial` when training starts, and tells it each step."""

    trial: Mapping[str, Any]
    _promise: Promise | None = None
    _optimizer_steps = -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._promise = Promise(
            self.trial,
            device_type=pl_module.device.type,
            devices=trainer.world_size,
            is_first=trainer.is_global_zero,
        )

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._promise is None:
            return
        if self._optimizer_steps != trainer.global_step:
            self._optimizer_steps = trainer.global_step
            self._promise.step_begins(pl_module, *trainer.optimizers)
        self._promise.saw_batch(batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._promise is not None and trainer.global_step > self._optimizer_steps:
            self._promise.step_ended()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._promise is not None:
            self._promise.interrupted("evaluation")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        if self._promise is not None:
            self._promise.interrupted("saving")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._promise is not None:
            self._promise.ends()
