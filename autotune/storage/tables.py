"""The tables, private to this package. `migrations/` upgrades an older database."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    DateTime,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement

METADATA = MetaData()

SCHEMA_VERSION = 4
"""Also stored with every study, so that an older autotune rejects the studies of a newer one."""

REVISION = "0004"
"""The last revision in `migrations/versions`."""

VERSION_TABLE = "autotune_alembic_version"
"""Not `alembic_version`, which Optuna uses for its studies in the same database."""

STUDIES = Table(
    "autotune_studies",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("schema_version", Integer, nullable=False),
    Column("name", String(100), nullable=False, unique=True),
    Column("created_at", DateTime(timezone=True), server_default=func.now(), nullable=False),
    Column("workload", JSON, nullable=False),
    Column("space", JSON, nullable=False),
    Column("device", JSON, nullable=False),
    Column("unavailable", JSON, nullable=False),
    Column("cap_bytes", BigInteger, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("sampler", String(20), nullable=False),
    Column("trials_wanted", Integer, nullable=False),
    # Counts the changes of its trials and confirmations. Every change raises it first, which locks
    # the study's row until the commit.
    Column("revision", Integer, nullable=False, server_default=text("0")),
)

TRIALS = Table(
    "autotune_trials",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("study_id", ForeignKey("autotune_studies.id", ondelete="CASCADE"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("fingerprint", String(12), nullable=False),
    Column("name", String(200)),
    Column("config", JSON, nullable=False),
    Column("measurement", JSON(none_as_null=True)),  # null while the trial has no result
    Column("seconds", Float),
    Column("started_at", DateTime(timezone=True), server_default=func.now(), nullable=False),
    Column("finished_at", DateTime(timezone=True)),
    # The study's revision at the trial's last change.
    Column("revision", Integer, nullable=False, server_default=text("0")),
    UniqueConstraint("study_id", "number"),
    UniqueConstraint("study_id", "fingerprint"),
    Index("autotune_trials_by_revision", "study_id", "revision"),
)

ATTEMPTS = Table(
    "autotune_attempts",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("trial_id", ForeignKey("autotune_trials.id", ondelete="CASCADE"), nullable=False),
    # 1 for the first. Unique for a trial, so that an attempt is retried only once.
    Column("ordinal", Integer, nullable=False),
    Column("worker", String(200), nullable=False),
    Column("state", String(12), nullable=False),
    Column("lease_until", Float, nullable=False),  # seconds since 1970 by the database's clock
    Column("renewals", Integer, nullable=False),
    Column("started_at", DateTime(timezone=True), server_default=func.now(), nullable=False),
    Column("ended_at", DateTime(timezone=True)),
    Column("cause", String(500), nullable=False),
    Column("measurement", JSON(none_as_null=True)),  # a late result, which does not count
    Column("seconds", Float),
    UniqueConstraint("trial_id", "ordinal"),
    Index(
        "autotune_one_running_attempt",
        "trial_id",
        unique=True,
        sqlite_where=text("state = 'running'"),
        postgresql_where=text("state = 'running'"),
    ),
)

PREDICTIONS = Table(
    "autotune_predictions",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("study_id", ForeignKey("autotune_studies.id", ondelete="CASCADE"), nullable=False),
    Column("fingerprint", String(12), nullable=False),
    Column("config", JSON, nullable=False),
    Column("prediction", JSON(none_as_null=True)),  # null: the model cannot be predicted
    Column("refusal", String(500), nullable=False),
    UniqueConstraint("study_id", "fingerprint"),
)

CONFIRMATIONS = Table(
    "autotune_confirmations",
    METADATA,
    # Chosen by the process that measured it, so that a repeated insert is recognized.
    Column("id", String(32), primary_key=True),
    Column("study_id", ForeignKey("autotune_studies.id", ondelete="CASCADE"), nullable=False),
    # 1 for the study's first.
    Column("ordinal", Integer, nullable=False),
    # Of the configuration in the result, by which damage is noticed.
    Column("fingerprint", String(12), nullable=False),
    Column("result", JSON, nullable=False),
    Column("created_at", DateTime(timezone=True), server_default=func.now(), nullable=False),
    UniqueConstraint("study_id", "ordinal"),
)

FIRST_REVISIONS: Mapping[str, str] = {ATTEMPTS.name: "0002", CONFIRMATIONS.name: "0004"}
"""The revision that added a table, for the tables that databases of before it lack."""


class DatabaseNow(FunctionElement[float]):
    """Seconds since 1970 by the database's clock, at the moment of the statement."""

    type = Float()
    inherit_cache = True


@compiles(DatabaseNow, "sqlite")
def _now_of_sqlite(*_: Any, **__: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(DatabaseNow, "postgresql")
def _now_of_postgresql(*_: Any, **__: Any) -> str:
    return "extract(epoch from clock_timestamp())"
