"""Finds which blocks of a model, or parts of blocks, are of the same kind."""

from collections.abc import Hashable, Sequence
from typing import Any

from torch import nn


def kinds_of(modules: Sequence[nn.Module]) -> list[Hashable]:
    """Returns the kind of each module: equal for alike ones.

    A kind is the classes of the modules inside, the shapes of their parameters and their plain
    attributes, such as the window of attention, but for those that number the modules.
    """
    attributes = _without_indices([plain_attributes(module) for module in modules])
    return [
        (_shapes(module), frozenset(own.items()))
        for module, own in zip(modules, attributes, strict=True)
    ]


def _shapes(block: nn.Module) -> frozenset[Any]:
    modules = {(path, type(module).__qualname__) for path, module in block.named_modules()}
    parameters = {(name, tuple(p.shape), str(p.dtype)) for name, p in block.named_parameters()}
    return frozenset(modules | parameters)


def plain_attributes(block: nn.Module) -> dict[tuple[str, str], Any]:
    """Returns the numbers, texts and flags of a module and those inside, by path and name."""
    found: dict[tuple[str, str], Any] = {}
    for path, module in block.named_modules():
        for name, value in vars(module).items():
            if value is None or isinstance(value, bool | int | float | str):
                found[path, name] = value
    return found


def _without_indices(
    attributes: Sequence[dict[tuple[str, str], Any]],
) -> list[dict[tuple[str, str], Any]]:
    """Removes the attributes that number the blocks, such as `layer_idx`."""
    numbering = set()
    for key in dict.fromkeys(key for one in attributes for key in one):
        numbers = [(index, one[key]) for index, one in enumerate(attributes) if key in one]
        are_whole = all(type(number) is int for _, number in numbers)
        if len(numbers) > 1 and are_whole and len({number - i for i, number in numbers}) == 1:
            numbering.add(key)
    return [
        {key: value for key, value in one.items() if key not in numbering} for one in attributes
    ]
