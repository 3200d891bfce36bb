"""The body of a submission as a JSON schema, made of the declared options.

The schema describes the settings; `submissions.py` checks them, with the sentences of the command
line.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.analysis.pick import PREFERENCE_OPTIONS
from autotune.service.submissions import (
    DECIDED_BY_SERVER,
    LARGEST_SPACE_CHARACTERS,
    SPACE_CONTENT,
)
from autotune.spec.option import (
    COUNT,
    DURATION,
    DURATION_OR_NONE,
    NUMBER,
    SIZE,
    SWITCH,
    TEXT,
    TEXTS,
    Kind,
    Option,
)
from autotune.spec.queued_search import MOST_PRIORITY
from autotune.spec.workload_options import WORKLOAD_OPTIONS
from autotune.study.request import SEARCH_OPTIONS

_TYPES: Sequence[tuple[Kind, Sequence[str]]] = (
    (TEXT, ("string",)),
    (TEXTS, ("object",)),
    (COUNT, ("integer",)),
    (NUMBER, ("number",)),
    (SWITCH, ("boolean",)),
    (SIZE, ("integer", "string")),
    (DURATION, ("number", "string")),
    (DURATION_OR_NONE, ("number", "string")),
)
"""The JSON types of each kind of option."""

_NUMBERS = {"type": "object", "additionalProperties": {"type": "number"}}

_OTHER_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "tolerance": {
        **_NUMBERS,
        "description": "Relative differences below this count as equal on the front: those of "
        "`speed` and `perplexity`.",
    },
    SPACE_CONTENT: {
        "type": "string",
        "maxLength": LARGEST_SPACE_CHARACTERS,
        "description": "A search space as the text of its TOML file; `space` is then its name.",
    },
    "model_config": {
        "type": "object",
        "description": "The content of a Hugging Face config.json; `model` is then its name.",
    },
    "script_arguments": {
        "type": "array",
        "items": {"type": "string"},
        "description": "Arguments of a script.",
    },
    "priority": {
        "type": "integer",
        "minimum": -MOST_PRIORITY,
        "maximum": MOST_PRIORITY,
        "description": "The highest begins first.",
    },
    "group": {
        "type": "string",
        "description": "A group of the server's devices; by default any.",
    },
}

SUBMISSION_EXAMPLES: Mapping[str, Any] = {
    "a quick search": {
        "value": {"space": "quick", "max_mem": "48MiB", "trials": 16, "name": "first"}
    },
    "a larger model": {
        "value": {
            "max_mem": "8GiB",
            "layers": 24,
            "width": 1024,
            "heads": 16,
            "time_budget": "1h",
            "priority": 5,
        }
    },
}


def _schema_of(option: Option) -> dict[str, Any]:
    types = next(types for kind, types in _TYPES if kind is option.kind)
    if option.flag == "--devices":
        types = ("integer", "string")
    schemas: list[dict[str, Any]] = [{"type": one} for one in types]
    if option.kind is TEXTS:
        schemas = [_NUMBERS]
    elif option.choices and option.metavar == "|".join(option.choices):
        schemas = [{"type": "string", "enum": list(option.choices)}]
    return {"anyOf": [*schemas, {"type": "null"}], "description": option.help}


def submission_schema() -> dict[str, Any]:
    """Return the JSON schema of a submission. No field is required."""
    fields: dict[str, Any] = {}
    options = (*SEARCH_OPTIONS.values(), *PREFERENCE_OPTIONS.values(), *WORKLOAD_OPTIONS.values())
    for option in options:
        if option.keyword not in DECIDED_BY_SERVER:
            fields[option.keyword] = _schema_of(option)
    fields |= _OTHER_FIELDS
    return {
        "title": "Submission",
        "type": "object",
        "description": "The settings of `autotune.search`, and those of the queue.",
        "properties": fields,
        "additionalProperties": False,
    }


SUBMISSION_BODY: Mapping[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": submission_schema(), "examples": SUBMISSION_EXAMPLES}
        },
    }
}
"""Of the OpenAPI document."""
