"""A copy of all that a migration could change, made before it: of a SQLite file the file, of others every row."""

import json
import re
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import sqlalchemy
from sqlalchemy import Connection

from autotune.errors import StorageUnavailable
from autotune.spec.study import RESULTS_FOLDER
from autotune.storage.database import Database
from autotune.storage.durable_file import durable_file
from autotune.storage.error_translation import way_out_of_damage
from autotune.storage.tables import METADATA, REVISION

_ROWS_AT_A_TIME = 500


def back_up(connection: Connection, database: Database) -> Path:
    """Raises StorageUnavailable where it cannot be written, or what is there cannot be read; nothing is changed then.

    `connection` holds the lock under which the migration runs.
    """
    source = database.file
    name = (
        source.stem
        if source
        else re.sub(r"[^\w.-]", "_", connection.engine.url.database or "studies")
    )
    suffix = source.suffix if source else ".jsonl"
    target = (source.parent if source else RESULTS_FOLDER) / (
        f"{name}.before-{REVISION}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}{suffix}"
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with durable_file(target) as unfinished:
            if source:
                _copy(source, unfinished, database.url)
            else:
                _dump(connection, unfinished)
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StorageUnavailable(
            f"the studies database {database.url} is of an older autotune, and the copy {target} that is made before "
            f"it is upgraded cannot be written: {reason}",
            hint=f"make room in {target.parent.absolute()}, and let it be written to",
        ) from None
    return target


def _copy(file: Path, target: Path, url: str) -> None:
    """By SQLite's own online backup: what is committed, also what is still in the write-ahead log."""
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(target)) as copy:
        source.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE")  # one file, without a log beside it
        (found,) = copy.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise StorageUnavailable(
            f"the studies database {url} is of an older autotune and damaged, and is not upgraded: {found}",
            hint=way_out_of_damage(url),
        )


def _dump(connection: Connection, target: Path) -> None:
    """Every row of our tables as it is, a JSON object a line."""
    there = sqlalchemy.inspect(connection).get_table_names()
    with target.open("w", encoding="utf-8") as lines:
        for table in METADATA.sorted_tables:
            if table.name in there:
                query = sqlalchemy.text(f"SELECT * FROM {table.name} ORDER BY id")
                rows = connection.execute(query, execution_options={"yield_per": _ROWS_AT_A_TIME})
                for row in rows.mappings():
                    lines.write(json.dumps({"table": table.name, **row}, default=str) + "\n")
