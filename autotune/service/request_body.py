"""The bodies of requests over HTTP: which settings they may name, their schemas, and their limits.

A setting is closed unless its declaration opens it (`Option.over_http`).
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

from autotune.errors import InvalidInput, NotAllowed
from autotune.spec.checked import parts_of, schema_of
from autotune.spec.setting import all_options_of, options_of, unknown_setting

SPACE_CONTENT = "space_content"
"""A search space as the text of its file, instead of the name of one."""
LARGEST_SPACE_CHARACTERS = 64 * 1024
LARGEST_CONFIG_CHARACTERS = 256 * 1024
LARGEST_TEXT_CHARACTERS = 4096
_DEEPEST = 20
_LARGEST_INTEGER = 2**53


def open_settings(kind: type) -> tuple[str, ...]:
    """Returns the names that the body of a request may have, also of its parts."""
    return tuple(n for n, option in all_options_of(kind).items() if option.over_http is True)


def open_beside_parts(kind: type) -> tuple[str, ...]:
    """Returns the names that a body may have whose parts are objects within it."""
    own = [name for name, option in options_of(kind).items() if option.over_http is True]
    return (*own, *parts_of(kind))


def body_of(
    kind: type,
    names: Collection[str],
    *,
    description: str,
    examples: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the body of a request as the OpenAPI document has it. No field is required."""
    schema = {"title": kind.__name__, "description": description, **_schema(kind, names)}
    content = {"application/json": {"schema": schema, "examples": examples}}
    return {"requestBody": {"required": True, "content": content}}


def _schema(kind: type, names: Collection[str]) -> dict[str, Any]:
    """Returns the JSON schema of an object with these settings of a request, parts among them."""
    options, parts = all_options_of(kind), parts_of(kind)
    fields: dict[str, Any] = {}
    for name in names:
        if name in parts:
            fields[name] = _schema(parts[name], open_settings(parts[name]))
        else:
            schema = schema_of(kind, name)
            fields[name] = {"anyOf": [schema, {"type": "null"}], "description": options[name].help}
    return {"type": "object", "properties": fields, "additionalProperties": False}


def check_names(settings: Mapping[str, Any], kind: type, *, accepted: Collection[str]) -> None:
    """Raise NotAllowed for a setting that only the command line takes; InvalidInput for no name."""
    options = all_options_of(kind)
    for name in settings:
        if name in accepted:
            continue
        if name not in options:
            raise unknown_setting(name, accepted)
        reason = options[name].over_http
        hint = "leave it out"
        if isinstance(reason, str):
            hint += f": {reason}"
        for part, members in parts_of(kind).items():
            if part in accepted and name in options_of(members):
                hint = f"put it into {part}"
        raise NotAllowed(f"a request over HTTP cannot have the setting {name!r}", hint=hint)


def check_values(settings: Mapping[str, Any]) -> None:
    """Raise InvalidInput for a value that is too large or nested for any setting."""
    limits = {
        SPACE_CONTENT: LARGEST_SPACE_CHARACTERS,
        "model_config": LARGEST_CONFIG_CHARACTERS,
    }
    for name, value in settings.items():
        longest = limits.get(name, LARGEST_TEXT_CHARACTERS)
        _check_depth(name, value, depth=0)
        if isinstance(value, dict | list):
            size = len(json.dumps(value))
        else:
            size = len(str(value)) if isinstance(value, str) else 0
        if size > longest:
            raise InvalidInput(
                f"{name} is too large: {size} characters", hint=f"give at most {longest}"
            )


def _check_depth(name: str, value: Any, *, depth: int) -> None:
    """Raise InvalidInput for values within values, numbers and characters that nothing can hold."""
    if depth > _DEEPEST:
        raise InvalidInput(f"{name} has values nested too deeply", hint="give plain values")
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_depth(name, key, depth=depth + 1)
            _check_depth(name, inner, depth=depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check_depth(name, inner, depth=depth + 1)
    elif isinstance(value, str):
        if "\0" in value or (not value.isascii() and not _is_encodable(value)):
            raise InvalidInput(
                f"{name} has a character that no name or text can hold: {value[:60]!r}",
                hint="leave it out",
            )
    elif isinstance(value, float):
        if value != value or abs(value) == float("inf"):
            raise InvalidInput(f"Invalid {name}: {value}", hint="give a finite number")
    elif isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        raise InvalidInput(f"Invalid {name}: the number is too large", hint="give a smaller one")


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can name
        return False
    return True
