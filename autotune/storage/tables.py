"""Our tables, beside Optuna's own in the same database. Private to this package."""

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    DateTime,
    Float,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    func,
)

METADATA = MetaData()

SCHEMA_VERSION = 1

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
    UniqueConstraint("study_id", "number"),
    UniqueConstraint("study_id", "fingerprint"),
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
