"""The output of a model with its 16-bit tensors in float32, in whatever object they are."""

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from autotune.shipped.signature import attributes_of

_OPAQUE = (str, bytes, int, float, complex, type, nn.Module, torch.dtype, torch.device)


def widened(output: Any) -> Any:
    """Returns `output` with its 16-bit tensors in float32; every object keeps its class.

    Looks into what torch's pytrees know (tuples, mappings, outputs of transformers), and into the
    attributes of other objects, such as dataclasses and those with `__slots__`. An object that
    holds no such tensor is returned itself.
    """
    return tree_map(_widened_leaf, output)


def _widened_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.float() if _is_narrow(leaf) else leaf
    if leaf is None or isinstance(leaf, _OPAQUE):
        return leaf
    return _widened_object(leaf)


def _with_wide_parts(leaf: Any) -> Any:
    if not _holds_narrow(leaf, set()):
        return leaf
    wide = copy(leaf)
    for name, part in _attributes(leaf).items():
        if _holds_narrow(part, {id(leaf)}):
            object.__setattr__(wide, name, widened(part))  # also in a frozen dataclass
    for key, part in _items(leaf).items():
        if _holds_narrow(part, {id(leaf)}):
            wide[key] = widened(part)
    return wide


_widened_object: Callable[[Any], Any] = torch.compiler.disable(_with_wide_parts)
"""Not compiled: it makes objects without calling their class."""


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def _holds_narrow(value: Any, seen: set[int]) -> bool:
    """Returns whether a 16-bit tensor is anywhere in a value, other than in the objects `seen`."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            if _is_narrow(leaf):
                return True
        elif leaf is not None and not isinstance(leaf, _OPAQUE) and id(leaf) not in seen:
            seen.add(id(leaf))
            parts = [*_attributes(leaf).values(), *_items(leaf).values()]
            if any(_holds_narrow(part, seen) for part in parts):
                return True
    return False


def _attributes(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object.

    None of a cache of keys and values, which the next call of the model reads as it is.
    """
    if any(kind.__name__.endswith("Cache") for kind in type(value).__mro__):
        return {}
    return attributes_of(value)


def _items(value: Any) -> dict[Any, Any]:
    """Returns the items of a mapping or list of a class that pytrees do not know."""
    if isinstance(value, dict):
        return dict(value)
    return dict(enumerate(value)) if isinstance(value, list) else {}
