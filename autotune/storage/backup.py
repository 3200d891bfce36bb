"""Copies all that a migration could change before it runs: the SQLite file, or every row."""

import json
import re
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import sqlalchemy
from sqlalchemy import Connection

from autotune.errors import StorageUnavailable
from autotune.files import durable_file
from autotune.spec.study import RESULTS_FOLDER
from autotune.storage.database import Database
from autotune.storage.error_translation import damage_hint
from autotune.storage.tables import METADATA, REVISION

_ROWS_AT_A_TIME = 500


def back_up(connection: Connection, database: Database) -> Path:
    """Writes the copy and returns its path; `connection` holds the migration's lock.

    Raises StorageUnavailable where the copy cannot be written or the database cannot be read.
    """
    source = database.file
    if source:
        folder, name, suffix = source.parent, source.stem, source.suffix
    else:
        folder, suffix = RESULTS_FOLDER, ".jsonl"
        name = re.sub(r"[^\w.-]", "_", connection.engine.url.database or "studies")
    target = folder / f"{name}.before-{REVISION}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}{suffix}"
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
            f"the studies database {database.url} is of an older autotune, and the copy {target} "
            f"that is made before it is upgraded cannot be written: {reason}",
            hint=f"make room in {target.parent.absolute()}, and let it be written to",
        ) from None
    return target


def _copy(file: Path, target: Path, url: str) -> None:
    """Copies by SQLite's online backup, which includes commits in the write-ahead log."""
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(target)) as copy:
        source.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE")  # a single file, without a log next to it
        (found,) = copy.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise StorageUnavailable(
            f"the studies database {url} is of an older autotune and damaged, "
            f"and is not upgraded: {found}",
            hint=damage_hint(url),
        )


def _dump(connection: Connection, target: Path) -> None:
    """Writes every row of the tables as it is, one JSON object per line."""
    there = sqlalchemy.inspect(connection).get_table_names()
    with target.open("w", encoding="utf-8") as lines:
        for table in METADATA.sorted_tables:
            if table.name in there:
                query = sqlalchemy.text(f"SELECT * FROM {table.name} ORDER BY id")
                rows = connection.execute(query, execution_options={"yield_per": _ROWS_AT_A_TIME})
                for row in rows.mappings():
                    lines.write(json.dumps({"table": table.name, **row}, default=str) + "\n")
