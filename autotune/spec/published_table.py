"""Published results for the named configurations of a search space, to compare a study with.

Allocated memory can be compared across machines. Speed cannot, except as a ratio to the control row
of the same run.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import InvalidInput
from autotune.spec.prediction import check_release
from autotune.spec.schema import Schema
from autotune.units import is_positive_number, parse_size


@dataclass(frozen=True, kw_only=True)
class Figures(Schema):
    """The three objectives of one configuration; None: not published."""

    peak_memory_bytes: int | None = None
    tokens_per_second: float | None = None
    perplexity: float | None = None


@dataclass(frozen=True, kw_only=True)
class Reference(Schema):
    """Published figures by name of the configuration."""

    source: str
    """Where they were published, as a URL or a text."""
    measured_on: str
    """Device and versions, as text."""
    torch: str | None = None
    """The torch release they were measured with."""
    control: str
    """Name of the row that the savings and speeds of all others are relative to."""
    rows: Mapping[str, Figures]

    def to_table(self) -> dict[str, Any]:
        """Return the table in the form that `read_reference` reads."""
        values = dataclasses.asdict(self)
        table = {key: value for key, value in values.items() if value is not None}
        table["rows"] = {name: _row_table(row) for name, row in self.rows.items()}
        return table


KEYS = ("source", "measured_on", "torch", "control", "rows")
ROW_KEYS = {
    "peak_memory": "peak_memory_bytes",
    "tokens_per_second": "tokens_per_second",
    "perplexity": "perplexity",
}


def read_reference(table: Mapping[str, Any], *, names: Iterable[str]) -> Reference:
    """Check the [reference] table of a search-space file and return it.

    `names` are the names of the file's configurations. Raises InvalidInput.
    """
    _check_keys(table, KEYS, where="reference")
    for key in ("source", "measured_on", "control"):
        _check_text(key, table.get(key))
    if table.get("torch") is not None:
        _check_text("torch", table["torch"])
        check_release(table["torch"])
    rows = table.get("rows")
    if not isinstance(rows, Mapping) or not rows:
        raise InvalidInput(
            "reference.rows is missing",
            hint='write [reference.rows] and below it control = { peak_memory = "21GiB" }',
        )
    known = list(names)
    for name in (*rows, table["control"]):
        if name not in known:
            if known:
                hint = f"the configurations are {', '.join(known)}"
            else:
                hint = "add [[configurations]] with names"
            raise InvalidInput(
                f"reference names {name!r}, but there is no configuration of that name", hint=hint
            )
    if table["control"] not in rows:
        raise InvalidInput(
            f"reference.rows has no row for its control, {table['control']!r}",
            hint="add that row",
        )
    figures = {name: _figures(name, row) for name, row in rows.items()}
    return Reference(**{**table, "rows": figures})


def _figures(name: str, row: Any) -> Figures:
    _check_keys(row, ROW_KEYS, where=f"reference.rows.{name}")
    for key, value in row.items():
        if key == "peak_memory":
            _check_text(f"rows.{name}.{key}", value)
        elif not is_positive_number(value):
            raise InvalidInput(
                f"reference.rows.{name}.{key} = {value!r} is not possible",
                hint="use a number above 0",
            )
    size = row.get("peak_memory")
    return Figures(
        peak_memory_bytes=None if size is None else parse_size(size),
        tokens_per_second=row.get("tokens_per_second"),
        perplexity=row.get("perplexity"),
    )


def _row_table(row: Figures) -> dict[str, Any]:
    values = {key: getattr(row, field) for key, field in ROW_KEYS.items()}
    if values["peak_memory"] is not None:
        values["peak_memory"] = str(values["peak_memory"])
    return {key: value for key, value in values.items() if value is not None}


def _check_keys(given: Any, known: Iterable[str], *, where: str) -> None:
    if not isinstance(given, Mapping):
        raise InvalidInput(
            f"{where} = {given!r} is not a table", hint=f"its keys are {', '.join(known)}"
        )
    for key in given:
        if key not in known:
            raise InvalidInput(
                f"unknown key {key!r} in {where}", hint=f"its keys are {', '.join(known)}"
            )


def _check_text(key: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise InvalidInput(
            f"reference.{key} = {value!r} is not a string", hint=f'write {key} = "..."'
        )
