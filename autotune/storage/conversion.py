"""Converts a database of an earlier autotune, after it was copied, in the caller's transaction.

Every version wrote the present tables at its end: what is older is of a time within 0.1.
"""

import json
import logging
import re
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy import Connection, Table, bindparam, func, insert, select, text, update

from autotune.errors import StorageUnavailable
from autotune.printable import printable
from autotune.spec.provenance_sentences import with_facts
from autotune.spec.study import RESULTS_FOLDER
from autotune.storage.database import Database
from autotune.storage.error_translation import damage_hint
from autotune.storage.leases import AttemptLease, LeadLease, RunLease
from autotune.storage.tables import (
    ATTEMPTS,
    METADATA,
    OWNERS,
    REVISION,
    SCHEMA_VERSION,
    SEARCHES,
    SERVER,
    SERVERS,
    STUDIES,
    TOKENS,
    TRIALS,
)
from autotune.system.failpoints import failpoint
from autotune.system.files import durable_file

_LOG = logging.getLogger(__name__)

_FIRST_REVISION_WITHOUT_SENTENCES = "0003"
"""Before it, results said in sentences where they come from."""
_FIRST_REVISION_WITH_BUDGETS = "0009"
"""Before it, a search did not say how long it runs at most, nor a token who is told of its end."""
_FIRST_REVISION_WITH_WORKERS = "0010"
"""Before it, only the leading server ran searches, by limits that it kept to itself."""
_FIRST_REVISION_WITH_ROLES = "0007"
"""Before it, a token could write or not, and what it wrote belonged to nobody."""


def convert(
    connection: Connection, database: Database, *, revision: str, is_copy: bool = False
) -> None:
    """Copies a database of an earlier autotune, and gives its rows what they lack.

    One that is itself a copy is not copied. Raises StorageUnavailable while a search or a server of
    that autotune uses it, which could not read what this one writes. One that was killed counts
    until its leases expire.
    """
    there = set(sqlalchemy.inspect(connection).get_table_names())
    for lease in (AttemptLease, RunLease, LeadLease):
        held = select(1).select_from(lease.table).where(lease.unexpired)
        if lease.table.name in there and connection.execute(held).first():
            raise StorageUnavailable(
                f"the studies database {database.url} is of an earlier autotune, and a search or "
                "a server of that autotune is using it",
                hint="let it end, or stop it; after a kill, wait a minute; then repeat this",
            )
    # Fails before a copy is made where the database cannot be written.
    connection.execute(text(f"UPDATE {STUDIES.name} SET name = name WHERE 1 = 0"))
    if not is_copy:
        _copy(connection, there, database)
    failpoint("schema backed up")
    _convert_rows(connection, there, revision)


def _copy(connection: Connection, there: set[str], database: Database) -> None:
    """Copies a SQLite file, or every row of another database as a line of JSON.

    Raises StorageUnavailable where the copy cannot be written or the file is damaged.
    """
    source = database.file
    folder = RESULTS_FOLDER if source is None else source.parent
    name = re.sub(r"[^\w.-]", "_", connection.engine.url.database or "studies")
    suffix = ".jsonl"
    if source is not None:
        name, suffix = source.stem, source.suffix
    copy = folder / f"{name}.before-{REVISION}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}{suffix}"
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with durable_file(copy) as unfinished:
            if source is None:
                _write_rows(connection, there, unfinished)
            else:
                _copy_file(source, unfinished, database.url)
    except (OSError, sqlite3.Error) as error:
        raise StorageUnavailable(
            f"the studies database {database.url} is of an older autotune, and the copy {copy} "
            f"that is made before it is upgraded cannot be written: "
            f"{getattr(error, 'strerror', None) or error}",
            hint=f"make room in {copy.parent.absolute()}, and let it be written to",
        ) from None
    _LOG.warning(
        "%s is of an earlier autotune and brought up to date; as it was: %s",
        printable(database.url),
        printable(str(copy)),
    )


def _copy_file(file: Path, copy: Path, url: str) -> None:
    """Copies by SQLite's online backup, which includes commits in the write-ahead log."""
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
        target.execute("PRAGMA journal_mode=DELETE")  # a single file, without a log next to it
        (damage,) = target.execute("PRAGMA integrity_check(1)").fetchone()
    if damage != "ok":
        raise StorageUnavailable(
            f"the studies database {url} is of an older autotune and damaged, "
            f"and is not upgraded: {damage}",
            hint=damage_hint(url),
        )


def _write_rows(connection: Connection, there: set[str], copy: Path) -> None:
    with copy.open("w", encoding="utf-8") as lines:
        for name in sorted(there & METADATA.tables.keys()):
            for row in connection.execute(text(f"SELECT * FROM {name}")).mappings():
                lines.write(json.dumps({"table": name, **row}, default=str) + "\n")


def _convert_rows(connection: Connection, there: set[str], revision: str) -> None:
    """Adds the columns and the facts that rows of an earlier autotune lack.

    Studies get the present number, by which an earlier autotune rejects them.
    """
    columns = {column["name"] for column in sqlalchemy.inspect(connection).get_columns(TRIALS.name)}
    if TRIALS.c.revision.name not in columns:
        for table in (STUDIES, TRIALS):
            connection.execute(
                text(f"ALTER TABLE {table.name} ADD COLUMN revision INTEGER DEFAULT 0 NOT NULL")
            )
        for index in TRIALS.indexes:
            index.create(connection)
    if revision < _FIRST_REVISION_WITHOUT_SENTENCES:
        for table in (TRIALS, ATTEMPTS):
            if table.name in there:
                _convert_measurements(connection, table)
    if revision < _FIRST_REVISION_WITH_ROLES:
        if TOKENS.name in there:
            _give_roles(connection)
        if SEARCHES.name in there:
            _give_owners(connection)
    if revision < _FIRST_REVISION_WITH_BUDGETS and SEARCHES.name in there:
        connection.execute(text(f"ALTER TABLE {SEARCHES.name} ADD COLUMN budget_seconds FLOAT"))
    if revision < _FIRST_REVISION_WITH_BUDGETS and TOKENS.name in there:
        connection.execute(text(f"ALTER TABLE {TOKENS.name} ADD COLUMN webhook TEXT"))
    if revision < _FIRST_REVISION_WITH_WORKERS:
        if SERVER.name in there:
            connection.execute(text(f"ALTER TABLE {SERVER.name} ADD COLUMN limits JSON"))
        if SERVERS.name in there:
            # None of them runs: each enters itself again.
            connection.execute(text(f"DROP TABLE {SERVERS.name}"))
    connection.execute(update(STUDIES).values(schema_version=SCHEMA_VERSION))


def _give_roles(connection: Connection) -> None:
    """Makes a reader of a token that could only read, and a member of every other."""
    for change in (
        f"ALTER TABLE {TOKENS.name} ADD COLUMN role VARCHAR(10) DEFAULT 'member' NOT NULL",
        f"ALTER TABLE {TOKENS.name} ADD COLUMN expires_at FLOAT",
        f"UPDATE {TOKENS.name} SET role = 'reader' WHERE read_only",
        f"ALTER TABLE {TOKENS.name} DROP COLUMN read_only",
    ):
        connection.execute(text(change))


def _give_owners(connection: Connection) -> None:
    """Lets a study belong to whoever submitted the first of its searches that is listed."""
    OWNERS.create(connection)
    first = select(func.min(SEARCHES.c.id)).group_by(SEARCHES.c.study)
    owned = select(SEARCHES.c.study, SEARCHES.c.submitted_by).where(SEARCHES.c.id.in_(first))
    connection.execute(insert(OWNERS).from_select(["study", "owner"], owned))


def _convert_measurements(connection: Connection, table: Table) -> None:
    """Replaces sentences about where a result comes from by facts.

    A row that cannot be read stays as it is, for `studies check` to report.
    """
    rows = connection.execute(
        select(table.c.id, table.c.measurement).where(table.c.measurement.is_not(None))
    )
    changes = [
        {"row": row.id, "facts": _with_facts(row.measurement)}
        for row in rows
        if isinstance(row.measurement, dict)
    ]
    if changes:
        change = update(table).where(table.c.id == bindparam("row"))
        connection.execute(change.values(measurement=bindparam("facts")), changes)


def _with_facts(measurement: dict[str, Any]) -> dict[str, Any]:
    if measurement.get("perplexity") is not None:
        # A perplexity without a source is of the time before trials could share one.
        source = measurement.get("perplexity_source") or "measured"
        if source == "measured, mean of 1 seeds":  # all other seeds had failed
            source = "measured"
        measurement = {**measurement, "perplexity_source": source}
    return with_facts(measurement)
