"""Whether stored values have the types that a dataclass says: a database keeps whatever was written into it."""

from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def check_types(stored: Any) -> None:
    """Raises ValueError for the first field of the dataclass `stored` whose value is of another type."""
    for name, fits in _checks_of(type(stored)):  # type: ignore[arg-type]  # types have a hash
        if not fits(value := getattr(stored, name)):
            raise ValueError(f"{name} is {_shown(value)}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


@cache
def _checks_of(dataclass_type: type) -> tuple[tuple[str, Callable[[object], bool]], ...]:
    return tuple((name, _check_of(hint)) for name, hint in get_type_hints(dataclass_type).items())


def _check_of(hint: Any) -> Callable[[object], bool]:
    """The quick look first: most fields are numbers, texts or None, and there are many rows."""
    plain = frozenset(_plain_types(hint))

    def fits(value: object) -> bool:
        return type(value) in plain or is_of_type(value, hint)

    return fits


def _plain_types(hint: Any) -> set[type]:
    if get_origin(hint) in (Union, UnionType):
        return set().union(*map(_plain_types, get_args(hint)))
    return (
        {int, float} if hint is float else {hint} if hint in (int, str, bool, NoneType) else set()
    )


def is_of_type(value: object, hint: Any) -> bool:
    """As JSON has them: a whole number is a float too, a list is a tuple."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(is_of_type(value, one) for one in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is tuple:
        return isinstance(value, list | tuple) and _items_fit(value, arguments)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(
            is_of_type(key, arguments[0]) and is_of_type(one, arguments[1])
            for key, one in value.items()
        )
    if hint in (int, float):
        return isinstance(value, int if hint is int else int | float) and not isinstance(
            value, bool
        )
    return isinstance(value, hint)


def _items_fit(items: list[Any] | tuple[Any, ...], hints: tuple[Any, ...]) -> bool:
    if hints[-1] is Ellipsis:
        return all(is_of_type(item, hints[0]) for item in items)
    return len(items) == len(hints) and all(map(is_of_type, items, hints))
