"""Creates the tables of a new database and upgrades those of an older autotune.

One process at a time does it, in one transaction, and `backup.py` first copies what a migration
changes.
"""

import logging
from pathlib import Path

import sqlalchemy
from sqlalchemy import Connection, select

from autotune.errors import StorageUnavailable, UnknownStudy
from autotune.failpoints import failpoint
from autotune.printable import printable
from autotune.storage.database import Database
from autotune.storage.error_translation import damage_hint
from autotune.storage.integrity.backup import back_up
from autotune.storage.integrity.sqlite_file import (
    reject_foreign_tables,
    reject_orphaned_rows,
    reject_stored_programs,
)
from autotune.storage.tables import (
    ATTEMPTS,
    FIRST_REVISIONS,
    METADATA,
    PREDICTIONS,
    REVISION,
    STUDIES,
    VERSION_TABLE,
    DatabaseNow,
)

_LOG = logging.getLogger(__name__)

MIGRATIONS = Path(__file__).parent / "migrations"

_ADVISORY_LOCK = 0x6175746F74756E65
"""`autotune` in ASCII: PostgreSQL identifies advisory locks by numbers."""


def open_studies(database: Database, *, create: bool) -> None:
    """Checks the tables of a database, and creates or upgrades them where necessary.

    Raises UnknownStudy where there are no tables and `create` is false, and StorageUnavailable for
    anything that is not a complete database of this autotune or an earlier one.
    """
    with database.engine.connect() as connection:
        if connection.dialect.name == "sqlite":
            reject_stored_programs(connection, database.url)
        # The revision is read first: another process may be creating all tables at this moment.
        revision = revision_of(connection)
        there = tables_of(connection)
        if not create and not there & {*METADATA.tables, VERSION_TABLE}:
            raise UnknownStudy(
                f"there are no studies in {database.url}", hint="begin one with: autotune search"
            )
        if revision == REVISION:
            check_tables(there, revision, database.url)
        elif connection.dialect.name == "sqlite":
            reject_foreign_tables(connection, database.url)
    if revision != REVISION:
        _bring_up_to_date(database)
    if database.engine.dialect.name == "sqlite":  # PostgreSQL always enforces foreign keys
        with database.engine.connect() as connection:
            reject_orphaned_rows(connection, database.url)


def tables_of(connection: Connection) -> set[str]:
    return set(sqlalchemy.inspect(connection).get_table_names())


def revision_of(connection: Connection) -> str | None:
    """Returns the schema revision; None for a database without tables or older than migrations."""
    if not sqlalchemy.inspect(connection).has_table(VERSION_TABLE):
        return None
    found: str | None = connection.scalar(
        sqlalchemy.text(f"SELECT version_num FROM {VERSION_TABLE}")
    )
    return found


def has_attempts(revision: str | None) -> bool:
    """Returns whether a database of this revision has attempts."""
    return ATTEMPTS.name not in _added_after(revision)


def _added_after(revision: str | None) -> set[str]:
    """Returns the names of the tables that a database of this revision lacks."""
    return {
        table for table, first in FIRST_REVISIONS.items() if revision is None or revision < first
    }


def check_tables(there: set[str], revision: str | None, url: str) -> None:
    """Raises StorageUnavailable for an unknown revision, or where its tables are missing."""
    known = {file.name.partition("_")[0] for file in (MIGRATIONS / "versions").glob("[0-9]*.py")}
    if revision is not None and revision not in known:
        raise StorageUnavailable(
            f"the studies database {url} has schema {revision}, "
            f"this autotune knows them up to {REVISION}",
            hint="use the autotune that wrote it, or a later one",
        )
    added_later = _added_after(revision)
    expected = {*METADATA.tables, VERSION_TABLE} - added_later
    if not has_attempts(revision):
        expected -= {PREDICTIONS.name, VERSION_TABLE}
    if added_later & there:
        expected.add(VERSION_TABLE)
        if VERSION_TABLE in there:
            raise StorageUnavailable(
                f"the studies database {url} has tables of a later schema than "
                f"{revision or 'none'}, which it names",
                hint=damage_hint(url),
            )
    missing = sorted(expected - there)
    if missing:
        tables = ", ".join(missing)
        if len(missing) == 1:
            tables = f"its table {tables}"
        raise StorageUnavailable(
            f"the studies database {url} has lost {tables}", hint=damage_hint(url)
        )


# -- upgrading -------------------------------------------------------------------------------------


def _bring_up_to_date(database: Database) -> None:
    with database.engine.connect() as connection:
        _lock(connection)
        revision = revision_of(connection)  # again: another process may have upgraded it
        if revision != REVISION:
            there = tables_of(connection)
            if there & {*METADATA.tables, VERSION_TABLE}:
                check_tables(there, revision, database.url)
                if has_attempts(revision):
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
