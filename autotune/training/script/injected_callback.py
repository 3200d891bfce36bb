"""Gives a Trainer of transformers our callback where its script does not, so that it is searched.

    trainer = Trainer(model=model, args=args, train_dataset=rows)     # no line of ours

In the process of a trial every Trainer gets `autotune.TrainerCallback(args)`, also one of a class
that stands on it, such as those of TRL. The callback changes the arguments before any `__init__`
sees them, as where a script makes it itself: some of these classes read them first. Of several
Trainers all get one, until the first one trains: it is the one that is searched.

Imports transformers.
"""

import functools
import inspect
from types import ModuleType
from typing import Any

from transformers import Trainer, TrainingArguments

from autotune.training.script import interface
from autotune.training.script.hugging_face import TrainerCallback

_READY = "_autotune_callback"
_given: list[TrainerCallback] = []
"""The callbacks that this module has made, of this process."""


def change(_trainer: ModuleType) -> None:
    """Changes the class Trainer, so that each one gets the callback."""
    init = Trainer.__init__
    signature = inspect.signature(init)

    def new(cls: type[Trainer], *args: Any, **kwargs: Any) -> Trainer:
        trainer: Trainer = object.__new__(cls)
        for value in (*args, *kwargs.values()):  # whatever its class calls them
            if isinstance(value, TrainingArguments) and _is_wanted(value):
                vars(trainer)[_READY] = _made(value)
        return trainer

    @functools.wraps(init)
    def with_callback(self: Trainer, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        ready: TrainerCallback | None = vars(self).pop(_READY, None)
        if given.get("args") is None:
            given["args"] = TrainingArguments("tmp_trainer")  # as Trainer does
        if ready is not None or _is_wanted(given["args"]):
            if ready is None or not ready.changes(given["args"]):
                ready = _made(given["args"])
            given["callbacks"] = [*(given.get("callbacks") or ()), ready]
            for learner in interface.learners():
                learner.note_injected(f"its {type(self).__name__} gets autotune.TrainerCallback")
        init(**given)

    Trainer.__new__ = new
    Trainer.__init__ = with_callback


def _is_wanted(args: TrainingArguments) -> bool:
    """Returns whether a Trainer that is made now needs a callback of ours.

    A trial knows the sequences of a step of the one that is searched.
    """
    run = interface.current_run()
    sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps
    if run is not None and not interface.learners() and sequences != run.workload.global_batch:
        return False
    if _given:
        return not any(callback.has_applied for callback in _given)
    return not interface.was_called()


def _made(args: Any) -> TrainerCallback:
    callback = TrainerCallback(args)
    _given.append(callback)
    return callback
