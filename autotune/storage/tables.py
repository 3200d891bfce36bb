"""The tables, private to this package. `conversion.py` upgrades an older database."""

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
    func,
    text,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement

from autotune.storage.stored_columns import StoredDate

METADATA = MetaData()

MOMENT = DateTime(timezone=True).with_variant(StoredDate, "sqlite")

SCHEMA_VERSION = 4
"""Also stored with every study, so that an older autotune rejects the studies of a newer one."""

REVISION = "0010"
"""The revision of these tables, which is stored with them; it grows with each change."""

VERSION = Table(
    # Not `alembic_version`, which Optuna uses for its studies in the same database.
    "autotune_alembic_version",
    METADATA,
    Column("version_num", String(32), primary_key=True),
)

STUDIES = Table(
    "autotune_studies",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("schema_version", Integer, nullable=False),
    Column("name", String(100), nullable=False, unique=True),
    Column("created_at", MOMENT, server_default=func.now(), nullable=False),
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
    Column("started_at", MOMENT, server_default=func.now(), nullable=False),
    Column("finished_at", MOMENT),
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
    Column("started_at", MOMENT, server_default=func.now(), nullable=False),
    Column("ended_at", MOMENT),
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
    Column("created_at", MOMENT, server_default=func.now(), nullable=False),
    UniqueConstraint("study_id", "ordinal"),
)

SEARCHES = Table(
    "autotune_searches",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("study", String(100), nullable=False),
    Column("state", String(12), nullable=False),
    Column("request", JSON, nullable=False),
    Column("priority", Integer, nullable=False, server_default=text("0")),
    # Empty for any group of devices.
    Column("device_group", String(100), nullable=False, server_default=""),
    Column("submitted_by", String(100), nullable=False),
    # Moments are seconds since 1970 by the database's clock.
    Column("submitted_at", Float, nullable=False),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("not_before", Float, nullable=False, server_default=text("0")),
    # Null: nothing limits its time, or an earlier autotune submitted it.
    Column("budget_seconds", Float),
    Column("reason", String(2000), nullable=False, server_default=""),
    Column("hint", String(2000), nullable=False, server_default=""),
    Column("exit_code", Integer),
    # Idempotency-Key of the submission, and a digest of what came with it.
    Column("key", String(310), unique=True),
    Column("digest", String(64), nullable=False, server_default=""),
    # Counts the processes that were started for it. What an earlier one writes does not count.
    Column("run", Integer, nullable=False, server_default=text("0")),
    Column("losses", Integer, nullable=False, server_default=text("0")),
    # Counts the events of the run, so that a repeated call adds none again.
    Column("reported", Integer, nullable=False, server_default=text("0")),
    Column("is_stopping", Boolean, nullable=False, server_default=false()),
    Column("is_announced", Boolean, nullable=False, server_default=false()),
    Column("host", String(200)),
    Column("pid", BigInteger),
    Column("process_started_at", Float),
    Column("lease_until", Float, nullable=False, server_default=text("0")),
    Column("progress", JSON(none_as_null=True)),
    Column("version", String(40), nullable=False, server_default=""),
    Index("autotune_searches_by_state", "state"),
    Index("autotune_searches_by_study", "study"),
    sqlite_autoincrement=True,  # the number of a removed search is not given to another one
)

USES = Table(
    # Apart from the searches: one that is removed from the list was run nevertheless.
    "autotune_uses",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("search_id", Integer, nullable=False),
    Column("person", String(100), nullable=False),
    # How many the group of the search has, which are kept for it.
    Column("devices", Integer, nullable=False),
    # Seconds since 1970 by the database's clock; no end: its process runs.
    Column("began_at", Float, nullable=False),
    Column("ended_at", Float),
    Index("autotune_uses_by_person", "person"),
)

OWNERS = Table(
    # Apart from the studies: a name belongs to who submitted a search of it, before it has begun.
    "autotune_owners",
    METADATA,
    Column("study", String(100), primary_key=True),
    Column("owner", String(100), nullable=False),
)

EVENTS = Table(
    "autotune_events",
    METADATA,
    # Without gaps, in the order of the commits: from `last_event` of the table of the server.
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    # 0 for an event of a study that is of no search.
    Column("search_id", Integer, nullable=False),
    Column("study", String(100), nullable=False),
    Column("kind", String(20), nullable=False),
    Column("data", JSON, nullable=False),
    Column("at", Float, nullable=False),
)

SERVER = Table(
    "autotune_server",
    METADATA,
    Column("id", Integer, primary_key=True),  # 1, of the only row
    Column("epoch", Integer, nullable=False),
    Column("holder", String(300), nullable=False),
    Column("version", String(40), nullable=False),
    Column("renewed_at", Float, nullable=False),
    Column("last_event", BigInteger, nullable=False),
    # What the leading server lets searches and people have; null: no limits.
    Column("limits", JSON(none_as_null=True)),
)

SERVERS = Table(
    "autotune_servers",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("digest", String(64), nullable=False, unique=True),
    Column("owner_digest", String(64), nullable=False),
    Column("address", String(300), nullable=False),
    Column("host", String(300), nullable=False),
    # The groups of devices that it runs searches on.
    Column("device_groups", JSON, nullable=False),
    Column("renewed_at", Float, nullable=False),
)

TOKENS = Table(
    "autotune_tokens",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("name", String(100), nullable=False, unique=True),
    # The SHA-256 of the token in hexadecimal digits. The token itself is stored nowhere.
    Column("digest", String(64), nullable=False, unique=True),
    Column("role", String(10), nullable=False, server_default="member"),
    Column("created_at", MOMENT, server_default=func.now(), nullable=False),
    Column("revoked_at", MOMENT),
    # Seconds since 1970 by the database's clock; null: it does not expire.
    Column("expires_at", Float),
    # The URL that is told when a search of that name ends; null: none.
    Column("webhook", Text),
)

ACTIONS = Table(
    "autotune_actions",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("at", MOMENT, server_default=func.now(), nullable=False),
    # The name of a token, or `owner`.
    Column("who", String(100), nullable=False),
    Column("action", String(40), nullable=False),
    Column("target", String(200), nullable=False),
    Column("detail", String(1000), nullable=False),
)

IDENTITY = Table(
    "autotune_identity",
    METADATA,
    Column("id", Integer, primary_key=True),  # 1, of the only row
    # 32 hexadecimal digits, drawn when the table is created.
    Column("identity", String(32), nullable=False),
)


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
