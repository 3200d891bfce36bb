"""Reads and checks the values of settings by the types of their fields, with pydantic."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from autotune.errors import InvalidInput
from autotune.spec.reading import shown
from autotune.spec.setting import (
    InvalidSetting,
    hints_of,
    option_of,
    options_of,
    specified,
    unknown_setting,
)


def checked(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of settings of `kind` by name. Raises InvalidSetting and InvalidInput."""
    parts = parts_of(kind)
    found = {}
    for name, value in values.items():
        if name in parts and isinstance(value, Mapping):
            value = specified(parts[name], value)
        found[name] = checked_setting(kind, name, value)
    return found


def checked_setting(kind: type, name: str, value: Any) -> Any:
    """Returns the value of one setting. Raises InvalidSetting and InvalidInput."""
    if name not in hints_of(kind):
        raise unknown_setting(name, options_of(kind) or hints_of(kind))
    option = option_of(kind, name)
    try:
        return _adapter(kind, name).validate_python(value)
    except ValidationError:
        raise InvalidSetting(option, shown(value), hint=option.hint(value)) from None
    except InvalidInput as error:  # what reads the text of a value knows more
        raise InvalidSetting(option, error.message, hint=error.hint) from None


def checked_beside(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of settings of a request and of its parts, which stand beside each other.

    Whether they fit together is not checked. Raises InvalidSetting and InvalidInput.
    """
    owners = _owners(kind)
    return {
        name: checked_setting(owners.get(name, kind), name, value) for name, value in given.items()
    }


def schema_of(kind: type, name: str) -> dict[str, Any]:
    """Returns the JSON schema of a setting of a request or of its parts."""
    return _adapter(_owners(kind)[name], name).json_schema()


def _owners(kind: type) -> dict[str, type]:
    """Returns the class that declares each setting, of a request or of its parts."""
    owners = {name: part for part in parts_of(kind).values() for name in hints_of(part)}
    return owners | dict.fromkeys(hints_of(kind), kind)


@cache
def parts_of(kind: type) -> Mapping[str, type]:
    """Returns the fields of a request that have the settings of another class, with the class."""
    return {
        field.name: field.metadata["part"] for field in fields(kind) if "part" in field.metadata
    }


@cache
def _adapter(kind: type, name: str) -> TypeAdapter[Any]:
    """Returns what reads a field; making it takes a part of a millisecond."""
    hint = hints_of(kind)[name]
    if is_dataclass(getattr(hint, "__origin__", hint)):
        return TypeAdapter(hint)  # it has a schema of its own
    return TypeAdapter(hint, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
