"""Checks stored values against the types of a dataclass: a JSON column accepts any value."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Predicate = Callable[[object], bool]


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
def _field_checks(dataclass_type: type) -> tuple[tuple[str, Predicate], ...]:
    hints = get_type_hints(dataclass_type)  # also of class variables, which are not stored
    return tuple(
        (field.name, is_of_type_check(hints[field.name])) for field in fields(dataclass_type)
    )


@cache
def is_of_type_check(hint: Any) -> Predicate:
    """Returns the predicate of type `hint`; an int is also a float, a list also a tuple.

    It is made once for each type, because there are many rows.
    """
    origin = get_origin(hint)
    arguments = get_args(hint)
    if hint is Any:
        return lambda value: True
    if origin in (Union, UnionType):
        return _any_of(tuple(map(is_of_type_check, arguments)))
    if origin is Literal:
        return lambda value: isinstance(value, str) and value in arguments
    if origin is tuple:
        return _tuple_of(arguments)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping_of(is_of_type_check(arguments[0]), is_of_type_check(arguments[1]))
    if hint is float:
        return lambda value: type(value) in (int, float)
    if hint is int:
        return lambda value: type(value) is int  # not a bool
    return lambda value: isinstance(value, hint)


def _any_of(checks: tuple[Predicate, ...]) -> Predicate:
    def fits(value: object) -> bool:
        return any(check(value) for check in checks)

    return fits


def _mapping_of(key_fits: Predicate, item_fits: Predicate) -> Predicate:
    def fits(value: object) -> bool:
        return isinstance(value, Mapping) and all(
            key_fits(key) and item_fits(item) for key, item in value.items()
        )

    return fits


def _tuple_of(hints: tuple[Any, ...]) -> Predicate:
    def fits(value: object) -> bool:
        if not isinstance(value, list | tuple):
            return False
        if hints[-1] is Ellipsis:
            return all(map(is_of_type_check(hints[0]), value))
        return len(value) == len(hints) and all(
            is_of_type_check(hint)(item) for hint, item in zip(hints, value, strict=True)
        )

    return fits
