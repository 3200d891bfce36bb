"""What a SQLite studies database must be before anything is read from it: ours, whole, and with all that belongs to it.

SQLite itself opens an empty file, one of another program, one that ends too early and one whose
write-ahead log was removed, and finds no fault. These looks are quick; all there is to find,
`check.py` finds.
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
from autotune.storage.error_translation import COPY_OF_FILE, way_out_of_damage
from autotune.storage.tables import METADATA, VERSION_TABLE

_MAGIC = b"SQLite format 3\0"
_OPTUNA = "version_info"
"""A table of Optuna's, which may keep its studies in the same file."""

_WAY_OUT = f"{COPY_OF_FILE}, or name another with --storage"


# -- the file --------------------------------------------------------------------------------------


def make_file(file: Path) -> None:
    """An empty database, whole or not there at all: an empty file is none of ours."""
    unfinished = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    try:
        with closing(sqlite3.connect(unfinished)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")  # writes the header
        os.link(unfinished, file)
    except (FileExistsError, sqlite3.Error):
        pass  # another process was quicker, or it cannot be: who opens it says why
    except OSError:
        pass  # a file system without links: SQLite makes the file when it opens it
    finally:
        unfinished.unlink(missing_ok=True)


def refuse_log_without_its_file(file: Path, url: str) -> None:
    """Raises StorageUnavailable where SQLite would read what was in a removed database into a new one."""
    log = _beside(file, "-wal")
    if not file.exists() and _has_content(log):
        raise StorageUnavailable(
            f"the studies database {url} is not there, but its write-ahead log {log} is",
            hint=f"bring the file back; to begin anew, remove {log} and {_beside(file, '-shm')}",
        )


def refuse_damaged_file(file: Path, url: str) -> None:
    """Raises StorageUnavailable for a file that is empty or ends before its last page, or whose log is missing."""
    with file.open("rb") as opened:
        header = opened.read(100)
    if not header:
        files = f"{file.name}, {file.name}-wal and {file.name}-shm"
        raise StorageUnavailable(
            f"the studies database {url} is an empty file",
            hint=f"{_WAY_OUT}; to begin anew, remove {files}",
        )
    if len(header) < 100:  # SQLite takes such a file for an empty one
        raise StorageUnavailable(
            f"the studies database {url} is not a database: it has {len(header)} bytes",
            hint=_WAY_OUT,
        )
    log = _beside(file, "-wal")
    if header.startswith(_MAGIC) and not _has_content(log):  # pages may be in it alone
        _refuse_truncated(file, header, url)
        _refuse_without_its_log(file, url)


def _refuse_truncated(file: Path, header: bytes, url: str) -> None:
    """The header is described in https://www.sqlite.org/fileformat.html."""
    page_bytes = int.from_bytes(header[16:18], "big")
    page_bytes = 65536 if page_bytes == 1 else page_bytes
    expected_bytes = int.from_bytes(header[28:32], "big") * page_bytes
    found_bytes = file.stat().st_size
    if found_bytes < expected_bytes:
        raise StorageUnavailable(
            f"the studies database {url} is truncated: it has {found_bytes} of {expected_bytes} bytes",
            hint=_WAY_OUT,
        )


def _refuse_without_its_log(file: Path, url: str) -> None:
    """The log's index outlives a killed process; what it says was not yet copied to the file was in the log alone.

    It is described in https://www.sqlite.org/walformat.html.
    """
    index, log = _beside(file, "-shm"), _beside(file, "-wal")
    try:
        content = index.read_bytes()[:100]
    except FileNotFoundError:
        return
    frames, copied = (int.from_bytes(content[at : at + 4], sys.byteorder) for at in (16, 96))
    is_now_there = (
        _has_content(log) or not index.exists()
    )  # another process opened or closed it meanwhile
    if len(content) == 100 and frames > copied and not is_now_there:
        raise StorageUnavailable(
            f"the write-ahead log {log} of the studies database is missing, and with it the last results",
            hint=f"bring that file back; to go on without those results, remove {index}",
        )


def _beside(file: Path, suffix: str) -> Path:
    return file.with_name(file.name + suffix)


def _has_content(file: Path) -> bool:
    try:
        return file.stat().st_size > 0
    except FileNotFoundError:
        return False


# -- the tables ------------------------------------------------------------------------------------


def refuse_foreign_tables(connection: Connection, url: str) -> None:
    """Raises StorageUnavailable for a file in which another program keeps its tables."""
    there = set(sqlalchemy.inspect(connection).get_table_names())
    ours = {*METADATA.tables, VERSION_TABLE}
    if there and not there & ours and _OPTUNA not in there:
        some = ", ".join(sorted(there)[:3])
        raise StorageUnavailable(
            f"the database {url} is not a studies database: it has tables of another program ({some})",
            hint="name another with --storage",
        )


def refuse_rows_of_nothing(connection: Connection, url: str) -> None:
    """Raises StorageUnavailable where rows are left of a study or a trial that was deleted.

    A new study would get its number, and then its trials.
    """
    for table in METADATA.sorted_tables:
        for key in table.foreign_keys:
            parent = key.column
            lost = sqlalchemy.exists().where(key.parent.not_in(sqlalchemy.select(parent)))
            if connection.scalar(sqlalchemy.select(lost)):
                raise StorageUnavailable(
                    f"the studies database {url} has rows in {table.name} of what is not in {parent.table.name}",
                    hint=way_out_of_damage(url),
                )
