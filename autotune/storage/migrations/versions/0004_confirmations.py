"""Adds confirmations, which are measurements beside the trials."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "autotune_confirmations",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column(
            "study_id",
            sa.Integer,
            sa.ForeignKey("autotune_studies.id", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("ordinal", sa.Integer, nullable=False),
        sa.Column("fingerprint", sa.String(12), nullable=False),
        sa.Column("result", sa.JSON, nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False
        ),
        sa.UniqueConstraint("study_id", "ordinal"),
    )
    # An autotune that would show unconfirmed speeds refuses the studies by this number.
    op.execute("UPDATE autotune_studies SET schema_version = 4 WHERE schema_version = 3")
