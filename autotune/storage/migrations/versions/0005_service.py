"""Adds the queue of the service with its events, its leading server, its tokens and its actions."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "autotune_searches",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("study", sa.String(100), nullable=False),
        sa.Column("state", sa.String(12), nullable=False),
        sa.Column("request", sa.JSON, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("device_group", sa.String(100), nullable=False, server_default=""),
        sa.Column("submitted_by", sa.String(100), nullable=False),
        sa.Column("submitted_at", sa.Float, nullable=False),
        sa.Column("started_at", sa.Float),
        sa.Column("ended_at", sa.Float),
        sa.Column("not_before", sa.Float, nullable=False, server_default=sa.text("0")),
        sa.Column("reason", sa.String(2000), nullable=False, server_default=""),
        sa.Column("hint", sa.String(2000), nullable=False, server_default=""),
        sa.Column("exit_code", sa.Integer),
        sa.Column("key", sa.String(310), unique=True),
        sa.Column("digest", sa.String(64), nullable=False, server_default=""),
        sa.Column("run", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("losses", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("reported", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("is_stopping", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("is_announced", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("host", sa.String(200)),
        sa.Column("pid", sa.BigInteger),
        sa.Column("process_started_at", sa.Float),
        sa.Column("lease_until", sa.Float, nullable=False, server_default=sa.text("0")),
        sa.Column("progress", sa.JSON),
        sa.Column("version", sa.String(40), nullable=False, server_default=""),
        sqlite_autoincrement=True,
    )
    op.create_index("autotune_searches_by_state", "autotune_searches", ["state"])
    op.create_index("autotune_searches_by_study", "autotune_searches", ["study"])
    op.create_table(
        "autotune_events",
        sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("search_id", sa.Integer, nullable=False),
        sa.Column("study", sa.String(100), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("data", sa.JSON, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
    )
    op.create_table(
        "autotune_server",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("holder", sa.String(300), nullable=False),
        sa.Column("version", sa.String(40), nullable=False),
        sa.Column("renewed_at", sa.Float, nullable=False),
        sa.Column("last_event", sa.BigInteger, nullable=False),
    )
    op.execute("INSERT INTO autotune_server VALUES (1, 0, '', '', 0, 0)")
    op.create_table(
        "autotune_tokens",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.String(100), nullable=False, unique=True),
        sa.Column("digest", sa.String(64), nullable=False, unique=True),
        sa.Column("read_only", sa.Boolean, nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False
        ),
        sa.Column("revoked_at", sa.DateTime(timezone=True)),
    )
    op.create_table(
        "autotune_actions",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.Column("who", sa.String(100), nullable=False),
        sa.Column("action", sa.String(40), nullable=False),
        sa.Column("target", sa.String(200), nullable=False),
        sa.Column("detail", sa.String(1000), nullable=False),
    )
