"""Run by alembic on the connection that `schema.py` hands over, inside its transaction."""

from alembic import context

from autotune.storage.tables import VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    version_table=VERSION_TABLE,
    # also on SQLite, which can; the whole upgrade is one transaction of the caller's
    transactional_ddl=True,
)
context.run_migrations()
