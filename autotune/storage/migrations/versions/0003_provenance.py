"""Stores where a perplexity and a reused result come from as facts instead of sentences."""

import json
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from alembic import op

from autotune.storage.old_measurements import upgraded_measurement

revision = "0003"
down_revision = "0002"

_ROWS_AT_A_TIME = 500


def upgrade() -> None:
    for name in ("autotune_trials", "autotune_attempts"):
        _upgrade_measurements(
            sa.table(name, sa.column("id"), sa.column("measurement", sa.JSON(none_as_null=True)))
        )
    # An autotune that reads sentences refuses the studies by this number.
    op.execute("UPDATE autotune_studies SET schema_version = 3 WHERE schema_version = 2")


def _upgrade_measurements(table: sa.TableClause) -> None:
    connection = op.get_bind()
    has_result = sa.select(table.c.id).where(table.c.measurement.is_not(None))
    ids = connection.scalars(has_result).all()
    change = (
        sa.update(table)
        .where(table.c.id == sa.bindparam("row_id"))
        .values(measurement=sa.bindparam("upgraded"))
    )
    for first in range(0, len(ids), _ROWS_AT_A_TIME):
        changes = list(_changes(connection, table, ids[first : first + _ROWS_AT_A_TIME]))
        if changes:
            connection.execute(change, changes)


def _changes(
    connection: sa.Connection, table: sa.TableClause, ids: Any
) -> Iterator[dict[str, Any]]:
    """Yields the rows to change. A damaged one stays as it is, for `studies check` to report."""
    # Unparsed and, on SQLite, not even decoded: a row that is not JSON must not hide the others.
    unparsed = sa.LargeBinary if connection.dialect.name == "sqlite" else sa.Text
    rows = sa.select(table.c.id, sa.cast(table.c.measurement, unparsed)).where(table.c.id.in_(ids))
    for row_id, stored in connection.execute(rows):
        try:
            before = json.loads(stored)
        except (ValueError, RecursionError):
            continue
        after = upgraded_measurement(before)
        if after is not before:
            yield {"row_id": row_id, "upgraded": after}
