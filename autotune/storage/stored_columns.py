"""Reads the columns of the database that are decoded: JSON, and dates.

A column may hold any text: SQLite checks none, and both databases may be edited. SQLAlchemy decodes
it while it fetches rows, so that one text which cannot be decoded would hide all other rows of a
query. It is therefore fetched as an `Unreadable`, which the reader of its row (`rows.py`) reports.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Dialect
from sqlalchemy.dialects import sqlite

_MOST_LEVELS = 50
"""Of JSON that is stored as it came, such as a model's config. Deeper ones can be decoded, but not
copied or compared, which takes a call for each level."""


@dataclass(frozen=True)
class Unreadable:
    """Stands for the content of a column that could not be decoded."""

    why: str
    """The end of a sentence that begins with the column."""


def decode(text: str | bytes) -> Any:
    """Returns what a JSON column holds; an `Unreadable` where that cannot be decoded."""
    try:
        return json.loads(text)
    except RecursionError:
        return Unreadable("is nested too deeply")
    except (ValueError, TypeError) as error:  # a number of too many digits is a ValueError, too
        return Unreadable(f"is not JSON: {error}")


class StoredDate(sqlite.DATETIME):
    """A date of SQLite, which stores it as text."""

    cache_ok = True

    def result_processor(self, dialect: Dialect, coltype: Any) -> Callable[[Any], Any] | None:
        """Returns the function that decodes a date, or gives an `Unreadable`."""
        decode_date: Callable[[Any], Any] | None = super().result_processor(dialect, coltype)
        if decode_date is None:
            return None

        def process(value: Any) -> Any:
            try:
                return decode_date(value)
            except (ValueError, TypeError):
                return Unreadable(f"is not a date: {value!r:.60}")

        return process


def check_decoded(row: Any, *columns: str) -> None:
    """Raises ValueError for the first of these columns of a row that could not be decoded.

    A row of an earlier schema lacks some columns.
    """
    for column in columns:
        value = getattr(row, column, None)
        if isinstance(value, Unreadable):
            raise ValueError(f"its {column} {value.why}")


def check_depth(*stored: Any) -> None:
    """Raises ValueError for values that are nested too deeply to work with."""
    level = list(stored)
    for _ in range(_MOST_LEVELS):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner.extend(value.values())
            elif isinstance(value, list):
                inner.extend(value)
        if not inner:
            return
        level = inner
    raise ValueError("it is nested too deeply")
