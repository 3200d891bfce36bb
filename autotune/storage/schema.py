"""Creates the tables of a new database and upgrades those of an older autotune.

One process at a time does it, in one transaction.
"""

import uuid
from collections import Counter

import sqlalchemy
from sqlalchemy import Connection, delete, insert, select

from autotune.errors import StorageUnavailable, StorageUpgraded, UnknownStudy
from autotune.storage.conversion import convert
from autotune.storage.database import Database
from autotune.storage.error_translation import damage_hint, redacted_url
from autotune.storage.tables import IDENTITY, METADATA, REVISION, SERVER, STUDIES, VERSION
from autotune.system.failpoints import failpoint

_OPTUNA = "version_info"
"""A table of Optuna, which may store its studies in the same database."""

_ADVISORY_LOCK = 0x6175746F74756E65
"""`autotune` in ASCII: PostgreSQL identifies advisory locks by numbers."""


def open_studies(database: Database, *, create: bool, is_copy: bool = False) -> None:
    """Checks the tables of a database, and creates or upgrades them where necessary.

    A database is copied before it is upgraded, unless it is itself a copy that nobody keeps.
    Raises UnknownStudy where there are no tables and `create` is false, and StorageUnavailable for
    anything that is not a database of this autotune or an earlier one.
    """
    with database.engine.connect() as connection:
        # The revision is read first: another process may be creating all tables at this moment.
        revision = revision_of(connection, database.url)
        there = tables_of(connection)
        if not create and not there & METADATA.tables.keys():
            raise UnknownStudy(
                f"there are no studies in {database.url}", hint="begin one with: autotune search"
            )
        if revision != REVISION and connection.dialect.name == "sqlite":
            _reject_foreign_tables(there, database.url)
    if revision != REVISION:
        _bring_up_to_date(database, is_copy=is_copy)
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

    Raises what `check_revision` does.
    """
    if not sqlalchemy.inspect(connection).has_table(VERSION.name):
        return ""
    return check_revision(connection, url)


def check_revision(connection: Connection, url: str) -> str:
    """Returns the schema revision of a database that has one.

    Raises StorageUpgraded for a later one, whose rows this autotune cannot interpret. A later
    autotune may have upgraded the database since it was opened. So who writes calls this in each
    transaction, after a change whose lock an upgrade waits for.
    """
    revision = connection.scalar(select(VERSION.c.version_num)) or ""
    if revision > REVISION:
        raise StorageUpgraded(
            f"the studies database {redacted_url(url)} has schema {revision}, "
            f"this autotune knows them up to {REVISION}",
            hint="use the autotune that wrote it, or a later one",
        )
    return str(revision)


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
    if there and not there & {*METADATA.tables, _OPTUNA}:
        some = ", ".join(sorted(there)[:3])
        raise StorageUnavailable(
            f"the database {url} is not a studies database: "
            f"it has tables of another program ({some})",
            hint="name another with --storage",
        )


# -- upgrading -------------------------------------------------------------------------------------


def _bring_up_to_date(database: Database, *, is_copy: bool) -> None:
    with database.engine.connect() as connection:
        _lock(connection)
        revision = revision_of(connection, database.url)
        if revision != REVISION:  # another process may have been faster
            there = tables_of(connection)
            if STUDIES.name in there:
                convert(connection, database, revision=revision, is_copy=is_copy)
            _create_tables(connection, there)
            failpoint("schema upgraded, not committed")
        connection.commit()


def _lock(connection: Connection) -> None:
    """Takes a lock that is released at the transaction's end.

    On SQLite it is the write lock; the transaction then includes the changes of tables.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(sqlalchemy.func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
    else:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def _create_tables(connection: Connection, there: set[str]) -> None:
    """Creates the tables that are missing, with the rows that they begin with."""
    METADATA.create_all(connection)
    if SERVER.name not in there:
        leader = {"epoch": 0, "holder": "", "version": "", "renewed_at": 0.0, "last_event": 0}
        connection.execute(insert(SERVER).values(id=1, **leader))
    if IDENTITY.name not in there:
        connection.execute(insert(IDENTITY).values(id=1, identity=uuid.uuid4().hex))
    connection.execute(delete(VERSION))
    connection.execute(insert(VERSION).values(version_num=REVISION))
