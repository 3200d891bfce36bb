"""Checks stored values against the types of a dataclass: a JSON column accepts any value.

A number is also compared with the range of its type (`spec/limits.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from autotune.spec.limits import FINITE, WHOLE, Range
from autotune.spec.prediction import Prediction
from autotune.spec.result import Measurement

Predicate = Callable[[object], bool]

_LONGEST_SHOWN = 60


def check_types(stored: Any) -> None:
    """Raises ValueError for the first field of a dataclass whose value its type does not allow."""
    for name, fits in _field_checks(type(stored)):  # type: ignore[arg-type]  # types have a hash
        value = getattr(stored, name)
        if not fits(value):
            raise ValueError(f"{name} is {shown(value)}")


def field_fits(dataclass_type: type, name: str, value: object) -> bool:
    """Whether a field of that name may have the value."""
    return dict(_field_checks(dataclass_type))[name](value)


def shown(value: object) -> str:
    """Returns a value as a message shows it: its beginning, where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError) as error:  # a number of very many digits, or deep lists
        return f"{type(value).__name__} that cannot be shown ({type(error).__name__})"
    if len(text) > _LONGEST_SHOWN:
        return f"{text[:_LONGEST_SHOWN]}…"
    return text


def check_measurement(measurement: Measurement) -> None:
    """Raises ValueError for a field of another type, also of those within its provenance."""
    check_types(measurement)
    source = measurement.perplexity_source
    if source is not None:
        check_types(source)
        for failed in source.failed_seeds:
            check_types(failed)
    for trial in (measurement.reused_from, None if source is None else source.trial):
        if trial is not None:
            check_types(trial)


def check_prediction(prediction: Prediction) -> None:
    """Raises ValueError for a field of another type or out of range."""
    check_types(prediction)
    for holder in prediction.holders:
        check_types(holder)
    if prediction.timeline is not None:
        check_types(prediction.timeline)


@cache
def _field_checks(dataclass_type: type) -> tuple[tuple[str, Predicate], ...]:
    # Also of class variables, which are not stored.
    hints = get_type_hints(dataclass_type, include_extras=True)
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
    if origin is Annotated:
        return _number_of(arguments[0], arguments[1])
    if origin in (Union, UnionType):
        return _any_of(arguments)
    if origin is Literal:
        return lambda value: isinstance(value, str) and value in arguments
    if origin is tuple:
        return _tuple_of(arguments)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping_of(is_of_type_check(arguments[0]), is_of_type_check(arguments[1]))
    if hint is float:
        return _number_of(float, FINITE)
    if hint is int:
        return _number_of(int, WHOLE)
    return lambda value: isinstance(value, hint)


def _number_of(kind: type, allowed: Range) -> Predicate:
    """Returns the predicate of numbers within a range; a bool is not a number.

    They are compared as they are: an int may be too large to become a float. NaN is in no range.
    """
    least, most = allowed.least, allowed.most
    if kind is int:
        return lambda value: type(value) is int and least <= value <= most
    return lambda value: type(value) in (float, int) and least <= value <= most  # type: ignore[operator]


def _any_of(hints: tuple[Any, ...]) -> Predicate:
    checks = tuple(is_of_type_check(hint) for hint in hints if hint is not type(None))
    has_none = type(None) in hints
    if has_none and len(checks) == 1:  # of most fields: as fast as it can be
        (check,) = checks
        return lambda value: value is None or check(value)

    def fits(value: object) -> bool:
        return (has_none and value is None) or any(check(value) for check in checks)

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
