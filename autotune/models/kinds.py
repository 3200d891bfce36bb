"""Finds which blocks of a model, or parts of blocks, are of the same kind."""

import functools
import re
from collections.abc import Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from autotune.shipped.changed_method import Changed

_AS_THEY_ARE = (
    bool | int | float | str | bytes | torch.dtype | type | ModuleType | BuiltinFunctionType
) | MethodDescriptorType
_NAMES_OF_NUMBERS = re.compile(r"(.*_)?(idx|index|id|number)|.*index")
"""Attributes that number even two blocks: two numbers of which the second is one more may be any.
"""
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_DEEPEST = 3
"""Objects within objects of which the contents are compared, as those of a config are."""


def kinds_of(modules: Sequence[nn.Module]) -> list[Hashable]:
    """Returns the kind of each module: equal for alike ones.

    A kind is the classes of the modules inside, the shapes of their parameters and buffers and
    their attributes, such as the window of attention, but for those that number the modules.
    """
    objects: dict[Hashable, int] = {}
    attributes = _without_indices([attributes_of(module, objects) for module in modules])
    return [
        (_shapes(module), frozenset(own.items()))
        for module, own in zip(modules, attributes, strict=True)
    ]


def _shapes(block: nn.Module) -> frozenset[Any]:
    modules = {(path, _classes_of(module)) for path, module in block.named_modules()}
    tensors = [*block.named_parameters(), *block.named_buffers()]
    return frozenset(modules | {(name, tuple(one.shape), str(one.dtype)) for name, one in tensors})


def _classes_of(module: nn.Module) -> tuple[type, ...]:
    """Returns the classes of a module but for those that are made anew for each module."""
    return tuple(
        one
        for one in type(module).__mro__
        if not issubclass(one, Changed) and one.__module__ != parametrize.__name__
    )


def attributes_of(
    block: nn.Module, objects: dict[Hashable, int]
) -> dict[tuple[str, str], Hashable]:
    """Returns what the attributes of a module and those inside hold, by path and name.

    Of objects, as configs are, it is a number, equal for equal contents: `objects` has those that
    were met before, and gets the others.
    """
    compared = _Compared(objects)
    return {
        (path, name): compared.value(value)
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if name not in _OF_EVERY_MODULE
    }


class _Compared:
    """Turns values into ones that are equal where what they hold is."""

    def __init__(self, objects: dict[Hashable, int]) -> None:
        self._objects = objects
        self._met: dict[int, Any] = {}

    def value(self, value: Any, depth: int = 0) -> Any:
        if value is None or isinstance(value, _AS_THEY_ARE):
            return value
        if isinstance(value, Tensor):
            return type(value), tuple(value.shape), str(value.dtype)
        if isinstance(value, nn.Module):
            return _classes_of(value)
        if isinstance(value, MethodType):
            return self.value(value.__func__, depth)
        if depth > _DEEPEST:
            return type(value)
        if isinstance(value, Mapping):
            pairs = (self._all((key, one), depth) for key, one in value.items())
            return type(value), frozenset(pairs)
        if isinstance(value, list | tuple):
            return type(value), self._all(value, depth)
        if isinstance(value, AbstractSet):
            return type(value), frozenset(self._all(value, depth))
        return self._of_object(value, depth)

    def _all(self, values: Any, depth: int) -> tuple[Hashable, ...]:
        return tuple(self.value(one, depth + 1) for one in values)

    def _of_object(self, value: Any, depth: int) -> Any:
        """Returns the same of a function or of another object, which may hold itself."""
        if id(value) not in self._met:
            self._met[id(value)] = type(value)
            self._met[id(value)] = self._contents(value, depth)
        return self._met[id(value)]

    def _contents(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, FunctionType):
            # A function that is made for each module, as a lambda is, has the same code.
            if value.__closure__ or value.__defaults__ or value.__kwdefaults__:
                return value
            return value.__module__, value.__code__
        if isinstance(value, functools.partial):
            return self._all((value.func, value.args, value.keywords), depth)
        contents = type(value), self.value(getattr(value, "__dict__", None), depth + 1)
        return type(value), self._objects.setdefault(contents, len(self._objects))


def _without_indices(
    attributes: Sequence[dict[tuple[str, str], Hashable]],
) -> list[dict[tuple[str, str], Hashable]]:
    """Removes the attributes that number the blocks, such as `layer_idx`."""
    numbering = set()
    for key in dict.fromkeys(key for one in attributes for key in one):
        numbers = [
            (index, number)
            for index, one in enumerate(attributes)
            if type(number := one.get(key)) is int
        ]
        are_whole = len(numbers) == sum(key in one for one in attributes)
        are_enough = len(numbers) > 2 or (len(numbers) > 1 and _NAMES_OF_NUMBERS.fullmatch(key[1]))
        if are_enough and are_whole and len({number - i for i, number in numbers}) == 1:
            numbering.add(key)
    return [
        {key: value for key, value in one.items() if key not in numbering} for one in attributes
    ]
