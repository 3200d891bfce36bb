"""Lets a forward pass that runs again in backward change the state of its modules once.

State is buffers, such as the statistics of BatchNorm, counts, or the vectors of a power iteration,
and plain attributes, such as a count in Python or a list of losses. A recomputation finds the state
that the first forward pass has found, and leaves the state that it finds itself.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from autotune.shipped.segment import SEGMENT

_CONTAINERS = (list, dict, set, deque)
_OF_TORCH = frozenset(vars(nn.Module())) | {SEGMENT}
"""Attributes that are no state of a module's own."""
_ABSENT = object()
_NOT_KEPT = object()
"""Stands for a value with a gradient, which an earlier pass has computed: no pass may use it again,
and its graph must not be kept."""


@dataclass(frozen=True)
class _Slot:
    """A buffer or attribute of a module: the entry `name` of one of its dictionaries."""

    holder: dict[str, Any]
    name: str
    is_changed_inside: bool
    """Whether the value is changed, and not only replaced by another one."""

    def value(self) -> Any:
        return self.holder.get(self.name, _ABSENT)

    def put(self, value: Any) -> None:
        if value is _ABSENT:
            self.holder.pop(self.name, None)
        else:
            self.holder[self.name] = value

    def kept(self) -> Any:
        """Returns what a recomputation needs of the value that is there now."""
        return _kept(self.value(), is_changed_inside=self.is_changed_inside)


_SlotsByModes = dict[tuple[bool, ...], list[_Slot]]

_changed_slots: WeakKeyDictionary[nn.Module, _SlotsByModes] = WeakKeyDictionary()
"""What forward passes were seen to change, by the first of their modules and by the modes, training
or evaluation, of all modules inside."""


@dataclass
class RecomputedForward:
    """A function to be recomputed: one forward pass through `modules`."""

    modules: Sequence[nn.Module]
    run: Callable[..., Any]
    keywords: Mapping[str, Any]
    _before: list[tuple[_Slot, Any]] | None = field(default=None, init=False)
    """What the first forward pass has found in the slots that it changes."""

    def __call__(self, *args: Any) -> Any:
        if self._before is not None:
            with _state_as(self._before):
                return self.run(*args, **self.keywords)
        parts = [part for module in self.modules for part in module.modules()]
        modes = tuple(part.training for part in parts)
        seen = _changed_slots.setdefault(self.modules[0], {})
        if modes not in seen:
            with _watched(parts) as found:
                output = self.run(*args, **self.keywords)
            seen[modes] = [slot for slot, _ in found]
            self._before = found
            return output
        self._before = [(slot, slot.kept()) for slot in seen[modes]]
        quiet = _other_buffers(parts, seen[modes])
        versions = [_version(buffer) for buffer in quiet]
        output = self.run(*args, **self.keywords)
        if versions != [_version(buffer) for buffer in quiet]:
            raise RuntimeError(
                f"{type(self.modules[0]).__name__} changes a buffer in some of its forward passes "
                "and not in others, so it cannot be recomputed: train without checkpointing"
            )
        return output


@contextmanager
def _state_as(before: list[tuple[_Slot, Any]]) -> Iterator[None]:
    now = [(slot, slot.value()) for slot, _ in before]
    copies: dict[int, Any] = {}  # one for all modules that share a buffer
    for slot, value in before:
        if slot.is_changed_inside:  # it is changed again, and there may be another recomputation
            slot.put(copies.setdefault(id(value), _copy_of(value)))
        elif value is not _NOT_KEPT:
            slot.put(value)
    try:
        yield
    finally:
        for slot, value in now:
            slot.put(value)


@contextmanager
def _watched(parts: Sequence[nn.Module]) -> Iterator[list[tuple[_Slot, Any]]]:
    """Finds out which slots of the modules are changed inside, and what was in them before."""
    copies: dict[int, tuple[Any, int | None]] = {}
    entries: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for holder in [holder for part in parts for holder in (part._buffers, vars(part))]:
        values = {name: holder[name] for name in _own_names(holder)}
        entries.append((holder, values))
        for value in values.values():
            if id(value) not in copies:
                copies[id(value)] = (_copy_of(value), _version(value))
    found: list[tuple[_Slot, Any]] = []
    yield found
    for holder, values in entries:
        for name, value in values.items():
            copied, version = copies[id(value)]
            if _is_changed(value, copied, version):
                found.append((_Slot(holder, name, True), copied))
            elif holder.get(name, _ABSENT) is not value:
                found.append((_Slot(holder, name, False), _kept(value, is_changed_inside=False)))
        new = [name for name in _own_names(holder) if name not in values]
        found += [(_Slot(holder, name, False), _ABSENT) for name in new]


def _own_names(holder: Mapping[str, Any]) -> list[str]:
    return [name for name in holder if name not in _OF_TORCH]


def _kept(value: Any, *, is_changed_inside: bool) -> Any:
    if is_changed_inside:
        return _copy_of(value)
    has_gradient = isinstance(value, Tensor) and value.grad_fn is not None
    return _NOT_KEPT if has_gradient else value


def _copy_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if type(value) in _CONTAINERS else value


def _is_changed(value: Any, copied: Any, version: int | None) -> bool:
    """Returns whether the content of `value` is another one than that of its copy."""
    if isinstance(value, Tensor):
        # A change by `.data` makes no new version. Fake tensors have no data.
        has_data = type(value) is Tensor and not value.is_meta
        return _version(value) != version or (has_data and not torch.equal(value, copied))
    if type(value) is dict:
        return list(value) != list(copied) or any(value[key] is not copied[key] for key in copied)
    if type(value) is set:
        return bool(value != copied)
    if type(value) in _CONTAINERS:
        return list(map(id, value)) != list(map(id, copied))
    return False


def _version(value: Any) -> int | None:
    """Returns the number of changes in place of a tensor; None if they are not counted."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def _other_buffers(parts: Sequence[nn.Module], slots: Sequence[_Slot]) -> list[Tensor]:
    changed = {(id(slot.holder), slot.name) for slot in slots}
    return [
        buffer
        for part in parts
        for name, buffer in part._buffers.items()
        if buffer is not None and (id(part._buffers), name) not in changed
    ]
