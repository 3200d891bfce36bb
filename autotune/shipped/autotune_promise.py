"""Says after twenty steps of transformers' Trainer whether it keeps what the trial promises.

    from autotune_promise import watch
    watch(trainer, {"trial": "study tour, trial 12", "tokens_per_second": 9000.0})

Exports call it. It needs only torch and transformers, and no autotune. Nothing else changes without
it, or with AUTOTUNE_PROMISE=0.
"""

import functools
from collections.abc import Mapping
from typing import Any

from transformers import Trainer, TrainerCallback

from autotune.shipped.promise import Promise


class PromiseCallback(TrainerCallback):
    """Tells a `Promise` the steps of a Trainer."""

    def __init__(self, promise: Promise) -> None:
        self._promise = promise

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._promise.step_begins(parts["model"], parts["optimizer"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._promise.step_ended()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._promise.interrupted("evaluation")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._promise.interrupted("saving")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._promise.ends()


def watch(trainer: Trainer, trial: Mapping[str, Any]) -> None:
    """Compares the next training of `trainer` with the numbers and facts of its trial, once."""
    promise = Promise(
        trial,
        device_type=trainer.args.device.type,
        devices=trainer.args.world_size,
        is_first=trainer.is_world_process_zero(),
    )
    if promise.is_over:
        return
    trainer.add_callback(PromiseCallback(promise))
    training_step = trainer.training_step

    @functools.wraps(training_step)
    def noting(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        promise.saw_batch(inputs)
        return training_step(model, inputs, *args, **kwargs)

    trainer.training_step = noting


def watch_trainers(trial: Mapping[str, Any]) -> None:
    """Watches the first Trainer that begins to train from now on."""
    train = Trainer.train

    @functools.wraps(train)
    def watched(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        Trainer.train = train
        watch(self, trial)
        return train(self, *args, **kwargs)

    Trainer.train = watched
