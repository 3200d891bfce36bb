"""Watches a training loop that calls nothing of ours: where it makes its parts, and steps.

The places are the lines in files of the user's that run meanwhile. Their frames are kept, so that
the script's own names of its model, its batch and its loss are found at the end.
"""

import functools
import os
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from autotune.shipped.batch_tokens import first_tensor
from autotune.techniques.user_optimizer import held_optimizers

FIRST_STEPS = 2
"""Updates of an optimizer after which a loop is known: between them is one whole step."""
_TRAINERS = ("transformers.trainer", "lightning.", "pytorch_lightning.")
"""Modules that have a training loop of their own."""
_MOST_ITEMS = 100
"""In a larger list or dictionary nobody keeps models, optimizers or a batch."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A line of the user's that runs."""

    frame: FrameType
    line: int
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    """{expression: module} of what the line could refer to at that time."""

    @property
    def file(self) -> str:
        return os.path.abspath(self.frame.f_code.co_filename)

    def names(self) -> dict[str, Any]:
        """Returns {expression: object} of what the code there refers to now, or at its end."""
        return dict(_names_in(self.frame.f_locals, self.frame.f_globals))

    def local_names(self) -> dict[str, Any]:
        """Returns the same without what is global, unless the code is that of a module."""
        return dict(_names_in(self.frame.f_locals))


@dataclass(frozen=True, kw_only=True)
class Made:
    """An object that the script has made, and the lines that have led to it, innermost first."""

    value: Any
    places: tuple[Place, ...]


@dataclass(kw_only=True)
class Steps:
    """The updates of an optimizer."""

    places: tuple[Place, ...] = ()
    """The lines that have led to the last one, innermost first."""
    count: int = 0
    backwards: int = 0
    """How often backward had run at the last one."""
    backwards_in_step: int = 1
    """How often backward ran between the last two."""
    loss: Tensor | None = None
    """What backward was called of before the last one."""
    backward: Place | None = None


class LoopWatch:
    """Notes what the script does until `close`.

    Must be made before the script imports torch's functions. `step_ended`, which may be set, is
    called after each update.
    """

    def __init__(self, is_users: Callable[[str], bool]) -> None:
        self.step_ended: Callable[[], None] = lambda: None
        self.loader: Made | None = None
        """The DataLoader whose batches the loop trains on: the last one that was iterated before
        the first backward."""
        self.batch: Tensor | None = None
        """The first tensor that a model was given in the last pass."""
        self.call: tuple[Place, nn.Module] | None = None
        """Where that was, and the model."""
        self.steps: dict[Optimizer, Steps] = {}
        """In the order of the first updates."""
        self.has_trainer = False
        """Whether the loop is that of a Trainer, and not the user's."""
        self._is_users = functools.cache(lambda file: is_users(os.path.abspath(file)))
        self._is_closed = False
        self._optimizers: list[Made] = []
        self._loaders: list[Made] = []
        self._has_batch = False
        self._backwards = 0
        self._loss: Tensor | None = None
        self._backward: Place | None = None
        _after(Optimizer, "__init__", self._note_optimizer)
        _after(DataLoader, "__init__", self._note_loader)
        _before(DataLoader, "__iter__", self._note_iteration)
        _before(nn.Module, "__call__", self._note_call)
        _before(torch.autograd, "backward", self._note_backward)
        self._hook = register_optimizer_step_post_hook(self._note_step)

    def close(self) -> None:
        """Notes nothing from now on."""
        self._is_closed = True
        self._hook.remove()  # what an optimizer supports depends on such hooks

    def optimizers(self) -> list[Made]:
        """Returns the optimizers that update weights; where none has, all that were made."""
        held = [part for made in self._optimizers for part in held_optimizers(made.value)]
        own = [made for made in self._optimizers if all(made.value is not part for part in held)]
        return [made for made in own if made.value in self.steps] or own

    # -- events ------------------------------------------------------------------------------------

    def _note_optimizer(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if not self._is_closed:
            self._optimizers.append(Made(value=optimizer, places=self._places_of(optimizer)))

    def _note_loader(self, loader: Any, *_: Any, **__: Any) -> None:
        if not self._is_closed:
            self._loaders.append(Made(value=loader, places=self._places_of(loader)))

    def _note_iteration(self, loader: Any) -> None:
        if not self._is_closed and self._backwards == 0:
            self.loader = next((made for made in self._loaders if made.value is loader), None)

    def _note_call(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if self._is_closed or self._has_batch or not torch.is_grad_enabled():
            return
        if any(parameter.requires_grad for parameter in module.parameters()):
            self._has_batch = True
            self.batch = first_tensor([*args, kwargs])
            place = next(self._places(), None)
            self.call = None if place is None else (place, module)

    def _note_backward(self, tensors: Any, *_: Any, **__: Any) -> None:
        if not self._is_closed:
            self._backwards += 1
            self._has_batch = False  # the next call belongs to another pass
            self._loss = first_tensor(tensors)
            self._backward = next(self._places(), None)

    def _note_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_closed:
            return
        steps = self.steps.setdefault(optimizer, Steps())
        steps.places = tuple(self._places())
        if steps.count:
            steps.backwards_in_step = self._backwards - steps.backwards
        steps.count += 1
        steps.backwards = self._backwards
        steps.loss, steps.backward = self._loss, self._backward
        self.has_trainer = self.has_trainer or _is_in_trainer()
        self.step_ended()

    def _places(self) -> Iterator[Place]:
        """Yields the lines of the user's that run, innermost first."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if self._is_users(frame.f_code.co_filename):
                yield Place(frame=frame, line=frame.f_lineno)
            frame = frame.f_back

    def _places_of(self, made: Any) -> tuple[Place, ...]:
        """Returns the lines that make this object; the methods of its own class are not among them.

        With each line the modules that it could refer to.
        """
        found = []
        for place in self._places():
            if not any(value is made for value in place.frame.f_locals.values()):
                modules = {
                    name: value
                    for name, value in place.names().items()
                    if isinstance(value, nn.Module)
                }
                found.append(Place(frame=place.frame, line=place.line, modules=modules))
        return tuple(found)


def _names_in(*scopes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the expressions by which code can refer to objects, simple ones first."""
    names: dict[str, Any] = {}
    for scope in scopes:
        for name, value in list(scope.items()):
            if not name.startswith("__"):
                names.setdefault(name, value)
    yield from names.items()
    for name, value in names.items():
        if isinstance(value, nn.Module):
            yield from ((f"{name}.{child}", module) for child, module in value.named_children())
        if type(value).__module__.partition(".")[0] not in ("builtins", "torch"):
            attributes = list(getattr(value, "__dict__", {}).items())
            yield from ((f"{name}.{attribute}", each) for attribute, each in attributes)
        if isinstance(value, dict | UserDict) and len(value) <= _MOST_ITEMS:
            yield from ((f"{name}[{key!r}]", each) for key, each in list(value.items()))
        if isinstance(value, list | tuple) and len(value) <= _MOST_ITEMS:
            yield from ((f"{name}[{index}]", each) for index, each in enumerate(value))


def _is_in_trainer() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_TRAINERS):
            return True
        frame = frame.f_back
    return False


def _before(owner: Any, name: str, note: Callable[..., None]) -> None:
    """Calls `note` with the arguments of each call of that function, before it."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return function(*args, **kwargs)

    setattr(owner, name, call)


def _after(owner: Any, name: str, note: Callable[..., None]) -> None:
    """Calls `note` with the arguments of each call of that function, when it has returned."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        note(*args, **kwargs)
        return result

    setattr(owner, name, call)
