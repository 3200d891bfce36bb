"""Adds attempts with their leases, and a count of changes for processes that share a study."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    for table in ("autotune_studies", "autotune_trials"):
        op.add_column(
            table, sa.Column("revision", sa.Integer, nullable=False, server_default=sa.text("0"))
        )
    op.create_index("autotune_trials_by_revision", "autotune_trials", ["study_id", "revision"])
    op.create_table(
        "autotune_attempts",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column(
            "trial_id",
            sa.Integer,
            sa.ForeignKey("autotune_trials.id", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("ordinal", sa.Integer, nullable=False),
        sa.Column("worker", sa.String(200), nullable=False),
        sa.Column("state", sa.String(12), nullable=False),
        sa.Column("lease_until", sa.Float, nullable=False),
        sa.Column("renewals", sa.Integer, nullable=False),
        sa.Column(
            "started_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False
        ),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        sa.Column("cause", sa.String(500), nullable=False),
        sa.Column("measurement", sa.JSON(none_as_null=True)),
        sa.Column("seconds", sa.Float),
        sa.UniqueConstraint("trial_id", "ordinal"),
    )
    running = sa.text("state = 'running'")
    op.create_index(
        "autotune_one_running_attempt",
        "autotune_attempts",
        ["trial_id"],
        unique=True,
        sqlite_where=running,
        postgresql_where=running,
    )
    # An autotune that knows no attempts refuses the studies by this number.
    op.execute("UPDATE autotune_studies SET schema_version = 2 WHERE schema_version = 1")
