"""Checks stored values against the types of a dataclass: a JSON column accepts any value."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def check_types(stored: Any) -> None:
    """Raises ValueError for the first field of a dataclass whose value is of another type."""
    for name, fits in _field_checks(type(stored)):  # type: ignore[arg-type]  # types have a hash
        value = getattr(stored, name)
        if not fits(value):
            text = repr(value)
            if len(text) > 60:
                text = f"{text[:60]}…"
            raise ValueError(f"{name} is {text}")


@cache
def _field_checks(dataclass_type: type) -> tuple[tuple[str, Callable[[object], bool]], ...]:
    hints = get_type_hints(dataclass_type)  # also of class variables, which are not stored
    return tuple((field.name, _make_check(hints[field.name])) for field in fields(dataclass_type))


def _make_check(hint: Any) -> Callable[[object], bool]:
    """Returns a predicate that tries a set of plain types first.

    Most fields are numbers, strings, None or a dataclass, and there are many rows.
    """
    plain = frozenset(_plain_types(hint))

    def fits(value: object) -> bool:
        return type(value) in plain or is_of_type(value, hint)

    return fits


def _plain_types(hint: Any) -> set[type]:
    if get_origin(hint) in (Union, UnionType):
        return set().union(*map(_plain_types, get_args(hint)))
    if hint is float:
        return {int, float}
    if hint in (int, str, bool, NoneType) or is_dataclass(hint):
        return {hint}
    return set()


def is_of_type(value: object, hint: Any) -> bool:
    """Whether a JSON value is of type `hint`; an int is also a float, a list also a tuple."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(is_of_type(value, member) for member in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is tuple:
        return isinstance(value, list | tuple) and _items_fit(value, arguments)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(
            is_of_type(key, arguments[0]) and is_of_type(item, arguments[1])
            for key, item in value.items()
        )
    if isinstance(value, bool) and hint in (int, float):
        return False
    if hint is float:
        return isinstance(value, int | float)
    return isinstance(value, hint)


def _items_fit(items: list[Any] | tuple[Any, ...], hints: tuple[Any, ...]) -> bool:
    if hints[-1] is Ellipsis:
        return all(is_of_type(item, hints[0]) for item in items)
    return len(items) == len(hints) and all(map(is_of_type, items, hints))
