"""Creates the tables of a new database and upgrades those of an older autotune.

One process at a time does it, in one transaction, and `backup.py` first copies what a migration
changes.
"""

import logging
from collections import Counter
from pathlib import Path

import sqlalchemy
from sqlalchemy import Connection, select

from autotune.errors import StorageUnavailable, UnknownStudy
from autotune.failpoints import failpoint
from autotune.printable import printable
from autotune.storage.backup import back_up
from autotune.storage.database import Database
from autotune.storage.error_translation import damage_hint
from autotune.storage.tables import (
    ATTEMPTS,
    METADATA,
    REVISION,
    STUDIES,
    VERSION_TABLE,
    DatabaseNow,
)

_LOG = logging.getLogger(__name__)

MIGRATIONS = Path(__file__).parent / "migrations"

_OPTUNA = "version_info"
"""A table of Optuna, which may store its studies in the same database."""

_ADVISORY_LOCK = 0x6175746F74756E65
"""`autotune` in ASCII: PostgreSQL identifies advisory locks by numbers."""


def open_studies(database: Database, *, create: bool) -> None:
    """Checks the tables of a database, and creates or upgrades them where necessary.

    Raises UnknownStudy where there are no tables and `create` is false, and StorageUnavailable for
    anything that is not a database of this autotune or an earlier one.
    """
    with database.engine.connect() as connection:
        # The revision is read first: another process may be creating all tables at this moment.
        revision = revision_of(connection, database.url)
        there = tables_of(connection)
        if not create and not there & {*METADATA.tables, VERSION_TABLE}:
            raise UnknownStudy(
                f"there are no studies in {database.url}", hint="begin one with: autotune search"
            )
        if revision != REVISION and connection.dialect.name == "sqlite":
            _reject_foreign_tables(there, database.url)
    if revision != REVISION:
        _bring_up_to_date(database)
    if database.engine.dialect.name == "sqlite":  # PostgreSQL always checks references
        with database.engine.connect() as connection:
            for orphans in orphaned_rows(connection):
                raise StorageUnavailable(
                    f"in the studies database {database.url} {orphans}",
                    hint=damage_hint(database.url),
                )


def tables_of(connection: Connection) -> set[str]:
    return set(sqlalchemy.inspect(connection).get_table_names())


def revision_of(connection: Connection, url: str) -> str:
    """Returns the schema revision, which grows; empty for a database that names none.

    Raises StorageUnavailable for a later one, whose rows this autotune cannot interpret.
    """
    if not sqlalchemy.inspect(connection).has_table(VERSION_TABLE):
        return ""
    found = connection.scalar(sqlalchemy.text(f"SELECT version_num FROM {VERSION_TABLE}"))
    revision = str(found or "")
    if revision > REVISION:
        raise StorageUnavailable(
            f"the studies database {url} has schema {revision}, "
            f"this autotune knows them up to {REVISION}",
            hint="use the autotune that wrote it, or a later one",
        )
    return revision


def orphaned_rows(connection: Connection) -> list[str]:
    """Returns a sentence for each table of SQLite with rows of a deleted study or trial.

    SQLite may give the id of a deleted study to a new one, which would then have these rows.
    """
    references = connection.execute(sqlalchemy.text("PRAGMA foreign_key_check"))
    missing = Counter((row.table, row.parent) for row in references)
    return [
        f"{table} has {count} rows that refer to missing rows of {parent}"
        for (table, parent), count in missing.items()
        if table in METADATA.tables
    ]


def _reject_foreign_tables(there: set[str], url: str) -> None:
    """Raises StorageUnavailable for a database that has only tables of another program."""
    if there and not there & {*METADATA.tables, VERSION_TABLE, _OPTUNA}:
        some = ", ".join(sorted(there)[:3])
        raise StorageUnavailable(
            f"the database {url} is not a studies database: "
            f"it has tables of another program ({some})",
            hint="name another with --storage",
        )


# -- upgrading -------------------------------------------------------------------------------------


def _bring_up_to_date(database: Database) -> None:
    with database.engine.connect() as connection:
        _lock(connection)
        revision = revision_of(connection, database.url)  # another process may have been faster
        if revision != REVISION:
            there = tables_of(connection)
            if there & {*METADATA.tables, VERSION_TABLE}:
                if ATTEMPTS.name in there:
                    _reject_running_searches(connection, database.url)
                # Fails before a copy is made where the database cannot be written.
                connection.execute(
                    sqlalchemy.text(f"UPDATE {STUDIES.name} SET name = name WHERE 1 = 0")
                )
                copy = back_up(connection, database)
                _LOG.warning(
                    "%s is of an earlier autotune and brought up to date; as it was: %s",
                    printable(str(database.url)),
                    printable(str(copy)),
                )
                failpoint("schema backed up")
            _upgrade(connection)
            failpoint("schema upgraded, not committed")
        connection.commit()


def _reject_running_searches(connection: Connection, url: str) -> None:
    """Raises StorageUnavailable while a search of an earlier autotune uses the database.

    It could not read what this one writes, and would lose results after the upgrade. A search that
    was killed counts until its leases expire.
    """
    running = (
        select(sqlalchemy.func.count())
        .select_from(ATTEMPTS)
        .where(ATTEMPTS.c.state == "running", ATTEMPTS.c.lease_until > DatabaseNow())
    )
    if connection.scalar(running):
        raise StorageUnavailable(
            f"the studies database {url} is of an earlier autotune, and a search of that autotune "
            "is using it",
            hint="let that search end, or stop it; after a kill, wait a minute; then repeat this",
        )


def _lock(connection: Connection) -> None:
    """Takes a lock that is released at the transaction's end.

    On SQLite it is the write lock; the transaction then includes the changes of tables.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(sqlalchemy.func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
    else:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def _upgrade(connection: Connection) -> None:
    # Half a second, which only new databases and those of an older autotune need.
    from alembic import command  # noqa: PLC0415
    from alembic.config import Config  # noqa: PLC0415

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
