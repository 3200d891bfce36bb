"""Changes a method of a module, and nothing else that a program can see of the module.

Names of parameters, buffers and modules stay, and so does `isinstance`: the module gets a subclass
of its class, with the same name. A pickle holds the class before, so that it loads where this code
is not installed; a copy has the changed method, too.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from autotune.shipped.segment import SEGMENT

Method = Callable[..., Any]

_LEFT_OUT = (SEGMENT, "_compiled_call_impl")
"""Attributes of an object that neither pickles nor copies have. torch leaves out the second one
itself, unless the class has its own `__getstate__`, as those of Lightning."""


@dataclass(frozen=True)
class _Before:
    """What a module was before its method was changed."""

    kind: type[nn.Module]
    name: str
    change: Callable[[Method], Method]
    own: Method | None
    """The method that was set on this object, not on its class."""


class Changed:
    """Mixed into the class of a module with a changed method."""

    _before: _Before

    def __init_subclass__(cls) -> None:
        """Hides the new class from the classes before it, which might register it by its name."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        if "_before" not in vars(type(self)):  # another library has changed the class once more
            return super().__reduce_ex__(protocol)
        with _as_before(self):
            # By later protocols pickle compares the class with the one that the object has now.
            return self.__reduce_ex__(1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        before = type(self)._before
        with _as_before(self):
            copied = copy.deepcopy(self, memo)
        change_method(copied, before.name, before.change)  # type: ignore[arg-type]
        return copied


def change_method(module: nn.Module, name: str, change: Callable[[Method], Method]) -> None:
    """Replaces method `name` of the module by the result of `change`.

    `change` gets a function of the module and the arguments, and returns another one. It must be
    the same object for modules that shall be of one class.
    """
    kind = type(module)
    own = vars(module).pop(name, None)
    make: Any = _subclass if own is None else functools.partial(_make, own=own)
    subclass = make(kind, name, change)
    object.__setattr__(module, "__class__", subclass)  # some modules have their own __setattr__


def _make(
    kind: type[nn.Module], name: str, change: Callable[[Method], Method], own: Method | None
) -> type[nn.Module]:
    inner: Method = getattr(kind, name)
    visible = inner
    if own is not None:
        visible = set_method = own

        def inner(_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return set_method(*args, **kwargs)

    namespace = {
        name: functools.wraps(visible)(change(inner)),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "_before": _Before(kind, name, change, own),
    }
    bases = (kind,) if issubclass(kind, Changed) else (Changed, kind)
    make_class: Any = type(kind)
    subclass: type[nn.Module] = make_class(kind.__name__, bases, namespace)
    return subclass


@functools.cache
def _subclass(
    kind: type[nn.Module], name: str, change: Callable[[Method], Method]
) -> type[nn.Module]:
    return _make(kind, name, change, None)


@contextmanager
def _as_before(module: Any) -> Iterator[None]:
    """Gives the module the class and the attributes that it had before its method was changed."""
    changed = type(module)
    before = changed._before
    attributes = vars(module)
    left_out = {name: attributes.pop(name) for name in _LEFT_OUT if name in attributes}
    object.__setattr__(module, "__class__", before.kind)
    if before.own is not None:
        attributes[before.name] = before.own
    try:
        yield
    finally:
        if before.own is not None:
            del attributes[before.name]
        object.__setattr__(module, "__class__", changed)
        attributes.update(left_out)
