"""Rows of our tables as lines of JSON, and back.

A line is an object with its `kind`; dates are in UTC.

A file of them begins with a header, and then has for each study, in this order, a line `study`, its
lines `trial`, `prediction` and `attempt`, and ends with a line that says how many they were and
what they hash to.
"""

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from sqlalchemy import BigInteger, Column, DateTime, Float, Table

from autotune.storage.rows import kept_text
from autotune.storage.tables import ATTEMPTS, PREDICTIONS, STUDIES, TRIALS

FORMAT = 1

Kind = Literal["study", "trial", "prediction", "attempt"]
KINDS: tuple[Kind, ...] = get_args(Kind)

TABLES: Mapping[Kind, Table] = {
    "study": STUDIES,
    "trial": TRIALS,
    "prediction": PREDICTIONS,
    "attempt": ATTEMPTS,
}

_NOT_CARRIED = ("schema_version", "study_id", "trial_id")
"""What a row has in its own database only; an attempt's line has its trial's number instead."""


def columns_of(kind: Kind) -> list[str]:
    """Those that a line has."""
    number_of_row = [] if kind == "attempt" else ["id"]
    return [
        column.name
        for column in TABLES[kind].columns
        if column.name not in (*number_of_row, *_NOT_CARRIED)
    ]


def line_of(kind: str, content: Mapping[str, Any]) -> bytes:
    values = {name: _plain(value) for name, value in content.items()}
    return json.dumps({"kind": kind, **values}, allow_nan=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Older databases hold numbers that are not finite."""
    if isinstance(value, datetime):
        return f"{value.astimezone(UTC) if value.tzinfo else value:%Y-%m-%dT%H:%M:%S.%fZ}"
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def kept_value(kind: Kind, column: str, value: Any) -> Any:
    """As every database can hold it: SQLite does not mind texts that are too long."""
    longest = getattr(TABLES[kind].columns[column].type, "length", None)
    return (
        value
        if longest is None or not isinstance(value, str)
        else kept_text(value, longest=longest)
    )


def values_of(kind: Kind, content: Mapping[str, Any]) -> dict[str, Any]:
    """The columns' values. Raises ValueError where some are missing, unknown or of another type."""
    expected = {*columns_of(kind), *(["trial"] if kind == "attempt" else []), "kind"}
    if odd := sorted(expected.symmetric_difference(content)):
        raise ValueError(
            f"{'it has no' if odd[0] in expected else 'there is no'} {odd[0]!r:.60} in a {kind}"
        )
    if kind == "attempt" and type(content["trial"]) is not int:
        raise ValueError(f"trial is {content['trial']!r:.60}")
    return {name: _value(TABLES[kind].columns[name], content[name]) for name in columns_of(kind)}


def _value(column: Column[Any], value: Any) -> Any:
    """Raises ValueError unless `column` can hold it."""
    if value is None and column.nullable:
        return None
    if isinstance(column.type, DateTime) and isinstance(value, str):
        return datetime.strptime(value, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
    wanted = column.type.python_type
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float) if wanted is float else wanted)
        or _is_too_large(column, value)
    ):
        raise ValueError(f"{column.name} is {value!r:.60}")
    return value


def _is_too_large(column: Column[Any], value: Any) -> bool:
    if isinstance(value, str):
        return kept_text(value, longest=column.type.length) != value  # type: ignore[attr-defined]  # of a String
    largest = 2**63 if isinstance(column.type, BigInteger) else 2**31
    return (
        isinstance(value, int)
        and not isinstance(column.type, Float)
        and not -largest <= value < largest
    )
