"""Brings a database's tables to the form this autotune reads: made where there are none, upgraded where they are old.

One process at a time does it, in one transaction, and `backup.py` copies before what a migration
changes.
"""

import logging
from pathlib import Path

import sqlalchemy
from sqlalchemy import Connection, select

from autotune.errors import StorageUnavailable, UnknownStudy
from autotune.failpoints import failpoint
from autotune.storage.database import Database
from autotune.storage.error_translation import way_out_of_damage
from autotune.storage.integrity.backup import back_up
from autotune.storage.integrity.sqlite_file import refuse_foreign_tables, refuse_rows_of_nothing
from autotune.storage.tables import (
    ATTEMPTS,
    METADATA,
    PREDICTIONS,
    REVISION,
    STUDIES,
    VERSION_TABLE,
)

_LOG = logging.getLogger(__name__)

MIGRATIONS = Path(__file__).parent / "migrations"

_ADVISORY_LOCK = 0x6175746F74756E65
"""`autotune` in ASCII: PostgreSQL's locks of this kind have numbers for names."""


def open_studies(database: Database, *, create: bool) -> None:
    """With the tables that this autotune reads; raises UnknownStudy where there are none and none are to be made.

    Raises StorageUnavailable for all that is no whole database of this autotune or an earlier one.
    """
    with database.engine.connect() as connection:
        revision = revision_of(
            connection
        )  # first: another process may make the tables, all at once, just now
        there = tables_of(connection)
        if not create and not there & {*METADATA.tables, VERSION_TABLE}:
            raise UnknownStudy(
                f"there are no studies in {database.url}", hint="begin one with: autotune search"
            )
        if revision == REVISION:
            check_tables(there, revision, database.url)
        elif connection.dialect.name == "sqlite":
            refuse_foreign_tables(connection, database.url)
    if revision != REVISION:
        _bring_up_to_date(database)
    if database.engine.dialect.name == "sqlite":  # PostgreSQL lets nobody make such rows
        with database.engine.connect() as connection:
            refuse_rows_of_nothing(connection, database.url)


def tables_of(connection: Connection) -> set[str]:
    return set(sqlalchemy.inspect(connection).get_table_names())


def revision_of(connection: Connection) -> str | None:
    """None for a database of before migrations, or without tables."""
    if not sqlalchemy.inspect(connection).has_table(VERSION_TABLE):
        return None
    found: str | None = connection.scalar(
        sqlalchemy.text(f"SELECT version_num FROM {VERSION_TABLE}")
    )
    return found


def check_tables(there: set[str], revision: str | None, url: str) -> None:
    """Raises StorageUnavailable where tables of that revision are missing, or it is none that this autotune knows."""
    known = {file.name.partition("_")[0] for file in (MIGRATIONS / "versions").glob("[0-9]*.py")}
    if revision is not None and revision not in known:
        raise StorageUnavailable(
            f"the studies database {url} has schema {revision}, this autotune knows them up to {REVISION}",
            hint="use the autotune that wrote it, or a later one",
        )
    expected = {*METADATA.tables, VERSION_TABLE}
    if revision != REVISION:
        expected -= {ATTEMPTS.name, PREDICTIONS.name, VERSION_TABLE}
        if ATTEMPTS.name in there:
            expected.add(VERSION_TABLE)
        if there >= {ATTEMPTS.name, VERSION_TABLE}:
            raise StorageUnavailable(
                f"the studies database {url} has tables of a later schema than {revision or 'none'}, which it names",
                hint=way_out_of_damage(url),
            )
    if missing := expected - there:
        raise StorageUnavailable(
            f"the studies database {url} has lost {'its table ' if len(missing) == 1 else ''}"
            + ", ".join(sorted(missing)),
            hint=way_out_of_damage(url),
        )


# -- upgrading -------------------------------------------------------------------------------------


def _bring_up_to_date(database: Database) -> None:
    with database.engine.connect() as connection:
        _lock(connection)
        revision = revision_of(connection)  # another process may have been quicker
        if revision != REVISION:
            there = tables_of(connection)
            if there & {*METADATA.tables, VERSION_TABLE}:
                check_tables(there, revision, database.url)
                # Where nothing may be written, this says so before a copy is made.
                connection.execute(
                    sqlalchemy.text(f"UPDATE {STUDIES.name} SET name = name WHERE 1 = 0")
                )
                copy = back_up(connection, database)
                _LOG.warning(
                    "%s is of an earlier autotune and brought up to date; as it was: %s",
                    database.url,
                    copy,
                )
                failpoint("schema backed up")
            _upgrade(connection)
            failpoint("schema upgraded, not committed")
        connection.commit()


def _lock(connection: Connection) -> None:
    """Until the transaction's end.

    On SQLite the write lock itself, which also makes the tables' changes part of it.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(sqlalchemy.func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
    else:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def _upgrade(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
