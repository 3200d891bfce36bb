"""Studies, trials and predictions, as they were before there were attempts."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Databases of the time before migrations have these tables, but perhaps no predictions."""
    there = sa.inspect(op.get_bind()).get_table_names()
    if "autotune_studies" not in there:
        _create_studies()
    if "autotune_predictions" not in there:
        _create_predictions()


def _create_studies() -> None:
    op.create_table(
        "autotune_studies",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("schema_version", sa.Integer, nullable=False),
        sa.Column("name", sa.String(100), nullable=False, unique=True),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False
        ),
        sa.Column("workload", sa.JSON, nullable=False),
        sa.Column("space", sa.JSON, nullable=False),
        sa.Column("device", sa.JSON, nullable=False),
        sa.Column("unavailable", sa.JSON, nullable=False),
        sa.Column("cap_bytes", sa.BigInteger, nullable=False),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("sampler", sa.String(20), nullable=False),
        sa.Column("trials_wanted", sa.Integer, nullable=False),
    )
    op.create_table(
        "autotune_trials",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column(
            "study_id",
            sa.Integer,
            sa.ForeignKey("autotune_studies.id", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("fingerprint", sa.String(12), nullable=False),
        sa.Column("name", sa.String(200)),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("measurement", sa.JSON(none_as_null=True)),
        sa.Column("seconds", sa.Float),
        sa.Column(
            "started_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False
        ),
        sa.Column("finished_at", sa.DateTime(timezone=True)),
        sa.UniqueConstraint("study_id", "number"),
        sa.UniqueConstraint("study_id", "fingerprint"),
    )


def _create_predictions() -> None:
    op.create_table(
        "autotune_predictions",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column(
            "study_id",
            sa.Integer,
            sa.ForeignKey("autotune_studies.id", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("fingerprint", sa.String(12), nullable=False),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("prediction", sa.JSON(none_as_null=True)),
        sa.Column("refusal", sa.String(500), nullable=False),
        sa.UniqueConstraint("study_id", "fingerprint"),
    )
