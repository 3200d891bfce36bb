"""Published results for the named configurations of a search space, to compare a study with.

Allocated memory can be compared across machines. Speed cannot, except as a ratio to the control row
of the same run.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import InvalidInput
from autotune.spec.limits import NeededBytes, Perplexity, Speed
from autotune.spec.prediction import check_release
from autotune.spec.schema import Schema
from autotune.units import parse_size


@dataclass(frozen=True, kw_only=True)
class Figures(Schema):
    """The three objectives of one configuration; None: not published."""

    peak_memory_bytes: NeededBytes | None = None
    tokens_per_second: Speed | None = None
    perplexity: Perplexity | None = None


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
        """Returns the table in the form that `read_reference` reads."""
        values = dataclasses.asdict(self)
        table = {key: value for key, value in values.items() if value is not None}
        table["rows"] = {name: _row_table(row) for name, row in self.rows.items()}
        return table


ROW_KEYS = {
    "peak_memory": "peak_memory_bytes",
    "tokens_per_second": "tokens_per_second",
    "perplexity": "perplexity",
}
_KEYS_HINT = (
    "source, measured_on, torch and control are texts; a row may have peak_memory, such as "
    '"21GiB", and the numbers tokens_per_second and perplexity, above 0'
)


def read_reference(table: Mapping[str, Any], *, names: Iterable[str]) -> Reference:
    """Returns the [reference] table of a search-space file, checked.

    `names` are the names of the file's configurations. Raises InvalidInput.
    """
    # It imports pydantic, which few search spaces need.
    from autotune.spec.reading import parse  # noqa: PLC0415

    rows = table.get("rows")
    if not isinstance(rows, Mapping) or not rows:
        raise InvalidInput(
            "reference.rows is missing",
            hint='write [reference.rows] and below it control = { peak_memory = "21GiB" }',
        )
    figures = {name: _figures(name, row) for name, row in rows.items()}
    try:
        reference = parse(Reference, {**table, "rows": figures})
    except ValueError as error:
        raise InvalidInput(f"the table cannot be read: {error}", hint=_KEYS_HINT) from None
    if reference.torch is not None:
        check_release(reference.torch)
    known = list(names)
    for name in (*rows, reference.control):
        if name not in known:
            if known:
                hint = f"the configurations are {', '.join(known)}"
            else:
                hint = "add [[configurations]] with names"
            raise InvalidInput(
                f"reference names {name!r}, but there is no configuration of that name", hint=hint
            )
    if reference.control not in rows:
        raise InvalidInput(
            f"reference.rows has no row for its control, {reference.control!r}",
            hint="add that row",
        )
    return reference


def _figures(name: str, row: Any) -> Any:
    """Returns a row with its size in bytes."""
    if not isinstance(row, Mapping) or "peak_memory" not in row:
        return row
    size = row["peak_memory"]
    if not isinstance(size, str):
        raise InvalidInput(
            f"reference.rows.{name}.peak_memory = {size!r} is not a string",
            hint='write peak_memory = "21GiB"',
        )
    others = {key: value for key, value in row.items() if key != "peak_memory"}
    return {**others, "peak_memory_bytes": parse_size(size)}


def _row_table(row: Figures) -> dict[str, Any]:
    values = {key: getattr(row, field) for key, field in ROW_KEYS.items()}
    if values["peak_memory"] is not None:
        values["peak_memory"] = str(values["peak_memory"])
    return {key: value for key, value in values.items() if value is not None}
