"""Databases that earlier releases have written: committed files, also copied to PostgreSQL."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import sqlalchemy

from autotune.storage.tables import METADATA, VERSION

DATA = Path(__file__).parents[1] / "storage" / "data"


def rows(file, table):
    with closing(sqlite3.connect(file)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute(f"SELECT * FROM {table} ORDER BY id")]


def copy_to_postgres(file, url, *, revision, tables):
    """Copy `tables` of a file to a database, which gets the tables of `revision`."""
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as connection:
        kept = [table for table in METADATA.sorted_tables if table.name in {*tables, VERSION.name}]
        METADATA.create_all(connection, tables=kept)
        if revision < "0002":
            for name in ("autotune_studies", "autotune_trials"):
                connection.execute(sqlalchemy.text(f"ALTER TABLE {name} DROP COLUMN revision"))
        connection.execute(VERSION.insert().values(version_num=revision))
        there = sqlalchemy.MetaData()
        there.reflect(connection, only=tables)
        for name in tables:
            _copy_table(connection, there.tables[name], rows(file, name))
    engine.dispose()


def _copy_table(connection, table, copied):
    json_columns = [one.name for one in table.columns if isinstance(one.type, sqlalchemy.JSON)]
    for row in copied:
        parsed = {
            one: json.loads(row[one]) if row[one] else sqlalchemy.null() for one in json_columns
        }
        connection.execute(table.insert().values({**row, **parsed}))
    if isinstance(table.c.id.type, sqlalchemy.Integer):
        last = f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), max(id)) FROM {table}"
        connection.execute(sqlalchemy.text(last))
