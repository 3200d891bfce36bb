"""Quick checks of a SQLite studies database before anything is read from it.

SQLite reports no error for an empty file, one of another program, a truncated one, or one whose
write-ahead log was removed. `check.py` does the thorough checks.
"""

import os
import sqlite3
import sys
import uuid
from contextlib import closing
from pathlib import Path

import sqlalchemy
from sqlalchemy import Connection

from autotune.errors import StorageUnavailable
from autotune.spec.full_disk import disk_full, is_of_full_disk
from autotune.spec.model_size import free_disk_bytes
from autotune.storage.error_translation import COPY_OF_FILE, damage_hint
from autotune.storage.tables import METADATA, VERSION_TABLE

_MAGIC = b"SQLite format 3\0"
_OPTUNA = "version_info"
"""A table of Optuna, which may store its studies in the same file."""

_LEAST_DATABASE_BYTES = 64 * 1024

_HINT = f"{COPY_OF_FILE}, or name another with --storage"


# -- the file --------------------------------------------------------------------------------------


def create_empty_database(file: Path) -> None:
    """Creates a database without tables, atomically: an empty file would be rejected as damaged."""
    unfinished = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    try:
        with closing(sqlite3.connect(unfinished)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")  # writes the header
        os.link(unfinished, file)
    except FileExistsError:
        pass  # another process has created it
    except (sqlite3.Error, OSError) as error:
        if is_of_full_disk(error):  # SQLite would create an empty file, and leave it
            raise disk_full(file.parent) from None
        # What is impossible, opening it reports. On a file system without hard links SQLite creates
        # the file when it opens it.
    finally:
        unfinished.unlink(missing_ok=True)


def reject_orphaned_log(file: Path, url: str) -> None:
    """Raises StorageUnavailable for a log without a file: SQLite would apply it to a new one."""
    log = _companion_file(file, "-wal")
    index = _companion_file(file, "-shm")
    if not file.exists() and _has_content(log):
        raise StorageUnavailable(
            f"the studies database {url} is not there, but its write-ahead log {log} is",
            hint=f"bring the file back; to begin anew, remove {log} and {index}",
        )


def check_sqlite_file(file: Path, url: str) -> None:
    """Raises StorageUnavailable for an empty or truncated file, or one whose log is missing."""
    with file.open("rb") as opened:
        header = opened.read(100)
    if not header:
        if free_disk_bytes(file.parent) < _LEAST_DATABASE_BYTES:
            raise disk_full(file.parent)  # which is why nothing could be written into it
        files = f"{file.name}, {file.name}-wal and {file.name}-shm"
        raise StorageUnavailable(
            f"the studies database {url} is an empty file",
            hint=f"{_HINT}; to begin anew, remove {files}",
        )
    if len(header) < 100:  # SQLite treats such a file as empty
        raise StorageUnavailable(
            f"the studies database {url} is not a database: it has {len(header)} bytes",
            hint=_HINT,
        )
    log = _companion_file(file, "-wal")
    # With a log the file may be short: the last pages may be in the log alone.
    if header.startswith(_MAGIC) and not _has_content(log):
        _reject_truncated(file, header, url)
        _reject_missing_log(file, url)


def _reject_truncated(file: Path, header: bytes, url: str) -> None:
    """Compares the file's size with its header: https://www.sqlite.org/fileformat.html."""
    page_bytes = int.from_bytes(header[16:18], "big")
    if page_bytes == 1:
        page_bytes = 65536
    expected_bytes = int.from_bytes(header[28:32], "big") * page_bytes
    found_bytes = file.stat().st_size
    if found_bytes < expected_bytes:
        raise StorageUnavailable(
            f"the studies database {url} is truncated: "
            f"it has {found_bytes} of {expected_bytes} bytes",
            hint=_HINT,
        )


def _reject_missing_log(file: Path, url: str) -> None:
    """Raises StorageUnavailable where the log's index lists frames that only a missing log had.

    The index outlives a killed process. Its format: https://www.sqlite.org/walformat.html.
    """
    index = _companion_file(file, "-shm")
    log = _companion_file(file, "-wal")
    try:
        content = index.read_bytes()[:100]
    except FileNotFoundError:
        return
    frames = int.from_bytes(content[16:20], sys.byteorder)
    copied = int.from_bytes(content[96:100], sys.byteorder)
    # Another process may have opened or closed the database since the index was read.
    has_changed = _has_content(log) or not index.exists()
    if len(content) == 100 and frames > copied and not has_changed:
        raise StorageUnavailable(
            f"the write-ahead log {log} of the studies database is missing, "
            "and with it the last results",
            hint=f"bring that file back; to go on without those results, remove {index}",
        )


def _companion_file(file: Path, suffix: str) -> Path:
    return file.with_name(file.name + suffix)


def _has_content(file: Path) -> bool:
    try:
        return file.stat().st_size > 0
    except FileNotFoundError:
        return False


# -- the tables ------------------------------------------------------------------------------------


def reject_foreign_tables(connection: Connection, url: str) -> None:
    """Raises StorageUnavailable for a file that has only tables of another program."""
    there = set(sqlalchemy.inspect(connection).get_table_names())
    ours = {*METADATA.tables, VERSION_TABLE}
    if there and not there & ours and _OPTUNA not in there:
        some = ", ".join(sorted(there)[:3])
        raise StorageUnavailable(
            f"the database {url} is not a studies database: "
            f"it has tables of another program ({some})",
            hint="name another with --storage",
        )


def reject_stored_programs(connection: Connection, url: str) -> None:
    """Raises StorageUnavailable for a view in the place of a table, and a trigger of a table.

    SQLite runs the statements of a view when it is read, and those of a trigger with a change; they
    can be without end, or delete what was stored. autotune creates none.
    """
    listed = connection.exec_driver_sql(
        "SELECT type, name, tbl_name FROM sqlite_master WHERE type IN ('view', 'trigger')"
    )
    for kind, name, table in listed:
        # The names of SQLite have no case.
        if str(table).lower() in {*METADATA.tables, VERSION_TABLE}:
            raise StorageUnavailable(
                f"the studies database {url} has a {kind} {str(name)[:100]!r}, which autotune has "
                "not created",
                hint=f"remove it with SQLite's own shell, or {COPY_OF_FILE}",
            )


def reject_orphaned_rows(connection: Connection, url: str) -> None:
    """Raises StorageUnavailable for rows of a study or a trial that was deleted.

    SQLite may give its id to a new study, which would then have these rows.
    """
    for table in METADATA.sorted_tables:
        for key in table.foreign_keys:
            parent = key.column
            is_orphan = key.parent.not_in(sqlalchemy.select(parent))
            if connection.scalar(sqlalchemy.select(sqlalchemy.exists().where(is_orphan))):
                raise StorageUnavailable(
                    f"the studies database {url} has rows in {table.name} "
                    f"that refer to missing rows of {parent.table.name}",
                    hint=damage_hint(url),
                )
