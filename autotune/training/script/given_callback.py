"""Gives a Trainer of transformers our callback where its script does not, so that it is searched.

    trainer = Trainer(model=model, args=args, train_dataset=rows)     # no line of ours

In the process of a trial every Trainer gets `autotune.TrainerCallback(args)`, also one of a class
that stands on it, such as those of TRL. The callback changes the arguments before any `__init__`
sees them, as where a script makes it itself: some of these classes read them first. A script that
calls a function of ours before it makes its Trainer is left as it is.

Imports transformers only where the script has done so.
"""

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from autotune.training.script import interface

TRAINER = "transformers.trainer"
_READY = "_autotune_callback"


def give_trainers_callbacks(*, told: Callable[[str], None]) -> None:
    """From now on, gives each Trainer that is made the callback, and says which class it was.

    `told` gets the name of the class.
    """
    change = functools.partial(_change_trainer, told=told)
    if TRAINER in sys.modules:
        change()
    else:
        sys.meta_path.insert(0, _AfterImport(TRAINER, change))


class _AfterImport(MetaPathFinder):
    """Calls a function once a module has been imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _change_trainer(*, told: Callable[[str], None]) -> None:
    """Changes the class Trainer, which must have been imported."""
    from transformers import Trainer, TrainingArguments  # noqa: PLC0415  # imported by the script

    from autotune.training.script.hugging_face import TrainerCallback  # noqa: PLC0415  # transformers

    init = Trainer.__init__
    signature = inspect.signature(init)

    def new(cls: type[Trainer], *args: Any, **kwargs: Any) -> Trainer:
        trainer: Trainer = object.__new__(cls)
        given = inspect.signature(cls.__init__).bind_partial(trainer, *args, **kwargs).arguments
        if not interface.was_called() and given.get("args") is not None:
            vars(trainer)[_READY] = TrainerCallback(given["args"])
        return trainer

    @functools.wraps(init)
    def with_callback(self: Trainer, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        ready: TrainerCallback | None = vars(self).pop(_READY, None)
        if ready is not None or not interface.was_called():
            if given.get("args") is None:
                given["args"] = TrainingArguments("tmp_trainer")  # as Trainer does
            if ready is None or not ready.changes(given["args"]):
                ready = TrainerCallback(given["args"])
            given["callbacks"] = [*(given.get("callbacks") or ()), ready]
            told(type(self).__name__)
        init(**given)

    Trainer.__new__ = new
    Trainer.__init__ = with_callback
