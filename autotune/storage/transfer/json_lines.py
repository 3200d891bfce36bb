"""Converts rows of the tables to lines of JSON, and back.

A line is an object with its `kind`; dates are in UTC. A file begins with a header line. For each
study follow, in this order, one line `study` and its lines `trial`, `prediction`, `attempt` and
`confirmation`. The last line has the number of lines before it and their SHA-256.
"""

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from sqlalchemy import JSON, BigInteger, Column, DateTime, Float, Table

from autotune.spec.limits import Finite
from autotune.spec.reading import fits, shown
from autotune.storage.rows import storable_text
from autotune.storage.tables import ATTEMPTS, CONFIRMATIONS, PREDICTIONS, STUDIES, TRIALS

FORMAT = 3
"""Format 2 has no confirmations, and format 1 has sentences in measurements where later ones have
facts; both are still imported."""

Kind = Literal["study", "trial", "prediction", "attempt", "confirmation"]
KINDS: tuple[Kind, ...] = get_args(Kind)

TABLES: Mapping[Kind, Table] = {
    "study": STUDIES,
    "trial": TRIALS,
    "prediction": PREDICTIONS,
    "attempt": ATTEMPTS,
    "confirmation": CONFIRMATIONS,
}

KINDS_WITH_ID: tuple[Kind, ...] = ("attempt", "confirmation")
"""Their rows have an id that is unique in all databases."""

_FIRST_YEAR, _LAST_YEAR = 1970, 9998
"""Of a date: half a day more or less, in another time zone, is still a date."""

_NOT_CARRIED = ("schema_version", "study_id", "trial_id")
"""Columns that mean something in one database only; an attempt's line has its trial's number."""


def column_names(kind: Kind) -> list[str]:
    """Returns the columns that a line of this kind has."""
    left_out = set(_NOT_CARRIED)
    if kind not in KINDS_WITH_ID:
        left_out.add("id")  # a row number
    return [column.name for column in TABLES[kind].columns if column.name not in left_out]


def encode_line(kind: str, content: Mapping[str, Any]) -> bytes:
    values = {name: _plain(value) for name, value in content.items()}
    return json.dumps({"kind": kind, **values}, allow_nan=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Returns `value` as JSON; infinities and NaN, which older databases contain, become null."""
    if isinstance(value, datetime):
        if value.tzinfo is not None:
            value = value.astimezone(UTC)
        return f"{value:%Y-%m-%dT%H:%M:%S.%fZ}"
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def storable_value(kind: Kind, column: str, value: Any) -> Any:
    """Returns `value` as every database can store it: SQLite accepts strings that are too long."""
    longest = getattr(TABLES[kind].columns[column].type, "length", None)
    if longest is None or not isinstance(value, str):
        return value
    return storable_text(value, longest=longest)


def column_values(kind: Kind, content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a line by column name.

    Raises ValueError where some are missing, unknown or of another type.
    """
    expected = {"kind", *column_names(kind)}
    if kind == "attempt":
        expected.add("trial")
    mismatched = sorted(expected.symmetric_difference(content))
    if mismatched:
        problem = "it has no" if mismatched[0] in expected else "there is no"
        raise ValueError(f"{problem} {mismatched[0]!r:.60} in a {kind}")
    if kind == "attempt" and type(content["trial"]) is not int:
        raise ValueError(f"trial is {shown(content['trial'])}")
    return {name: _value(TABLES[kind].columns[name], content[name]) for name in column_names(kind)}


def _value(column: Column[Any], value: Any) -> Any:
    """Returns `value` as `column` stores it. Raises ValueError where it cannot."""
    if value is None and column.nullable:
        return None
    if isinstance(column.type, DateTime) and isinstance(value, str):
        return _date(column.name, value)
    types: Any = column.type.python_type
    if isinstance(column.type, JSON):
        types = dict  # its own type is any object; every such column has a table or null
    elif types is float:
        types = (int, float)
    is_of_type = isinstance(value, types) and not isinstance(value, bool)
    if not is_of_type or _is_too_large(column, value):
        raise ValueError(f"{column.name} is {shown(value)}")
    return value


def _date(name: str, text: str) -> datetime:
    """Returns a moment in UTC. Raises ValueError for one that no time zone could show."""
    try:
        moment = datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
    except ValueError:
        raise ValueError(f"{name} is {shown(text)}") from None
    if not _FIRST_YEAR <= moment.year <= _LAST_YEAR:
        raise ValueError(f"{name} is {shown(text)}")
    return moment


def _is_too_large(column: Column[Any], value: Any) -> bool:
    if isinstance(value, str):
        longest = column.type.length  # type: ignore[attr-defined]  # of a String
        return storable_text(value, longest=longest) != value
    if isinstance(column.type, Float):
        return not fits(Finite, value)
    if not isinstance(value, int):
        return False
    limit = 2**63 if isinstance(column.type, BigInteger) else 2**31
    return not -limit <= value < limit
