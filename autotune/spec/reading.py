"""Reads JSON into dataclasses, with pydantic: of files, rows, other processes and servers."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from autotune.spec.schema import Schema

T = TypeVar("T", bound=Schema)

_LONGEST_SHOWN = 60


def parse(kind: type[T], stored: object, *, ignore_unknown: bool = False) -> T:
    """Returns the dataclass of a JSON object; of an instance, the same with its fields checked.

    With `ignore_unknown`, fields that a later version may have added are left out. Raises
    ValueError with the first problem, and what a class that is `Built` raises.
    """
    extra: Literal["ignore"] | None = "ignore" if ignore_unknown else None
    try:
        parsed: T = _adapter(kind).validate_python(stored, extra=extra)  # type: ignore[arg-type]
    except ValidationError as error:
        raise ValueError(_first_problem(error)) from None
    return parsed


def prepare_to_parse(kind: Any) -> None:
    """Makes what `parse` needs for a class, which takes up to a tenth of a second, beforehand."""
    _adapter(kind)


def check(instance: Schema) -> None:
    """Raises ValueError with the first field whose value is of another type or out of range."""
    parse(type(instance), instance)


def fits(kind: Any, value: object) -> bool:
    """Returns whether a value is of a type, such as `Seconds`."""
    try:
        _adapter(kind).validate_python(value)
    except ValidationError:
        return False
    return True


def possible(kind: type[Schema], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that a dataclass can have, so that `parse` can read them.

    A value that it cannot have is replaced by the default of its field, and left out of a mapping.
    """
    result = dict(values)
    try:
        _adapter(kind).validate_python(result)  # type: ignore[arg-type]
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            name, *inner = map(str, problem["loc"])
            content = result.get(name)
            if inner and isinstance(content, Mapping):
                result[name] = {key: item for key, item in content.items() if str(key) != inner[0]}
            else:
                result[name] = _default_of(kind, name)
    return result


def _default_of(kind: type[Schema], name: str) -> Any:
    defaults = {field.name: field.default for field in fields(kind)}  # type: ignore[arg-type]
    default = defaults.get(name)
    return None if default is MISSING else default


def shown(value: object) -> str:
    """Returns a value as a message shows it: its beginning, where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError) as error:  # a number of very many digits, or deep lists
        return f"{type(value).__name__} that cannot be shown ({type(error).__name__})"
    if len(text) > _LONGEST_SHOWN:
        return f"{text[:_LONGEST_SHOWN]}…"
    return text


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Returns what reads a type; making it takes milliseconds."""
    if isinstance(kind, type) and issubclass(kind, Schema):
        return TypeAdapter(kind)
    return TypeAdapter(kind, config={"strict": True})


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in problem["loc"])
    match problem["type"]:
        case "missing":
            return f"it has no {name!r}"
        case "unexpected_keyword_argument":
            return f"it has {name!r:.60}, which is not known"
        case "value_error":
            return str(problem["ctx"]["error"])
    return f"{name or 'it'} is {shown(problem['input'])}"
