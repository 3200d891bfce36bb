"""Alembic runs this on the connection that `schema.py` passes, inside its transaction."""

from alembic import context

from autotune.storage.tables import VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    version_table=VERSION_TABLE,
    # Also on SQLite, which supports it: the whole upgrade is part of the caller's transaction.
    transactional_ddl=True,
)
context.run_migrations()
