"""Adds the identity of the database, by which its work folder is named."""

import uuid

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    table = op.create_table(
        "autotune_identity",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("identity", sa.String(32), nullable=False),
    )
    op.bulk_insert(table, [{"id": 1, "identity": uuid.uuid4().hex}])
