"""The studies database: what was asked and every result. Plain dataclasses in and out; no row leaves this package.

Optuna keeps its own tables in the same database, for its samplers only: what autotune shows comes from here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy import Connection, Engine, create_engine, event, insert, select, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError, SQLAlchemyError

from autotune.config import TrainingConfig
from autotune.definition import DEFAULT_STORAGE, StudyDefinition
from autotune.errors import StorageUnavailable, StudyMismatch, UnknownStudy
from autotune.result import DeviceInfo, Measurement, TrialRecord
from autotune.search_space import SearchSpace
from autotune.storage.tables import METADATA, SCHEMA_VERSION, STUDIES, TRIALS
from autotune.workload import Workload

BUSY_TIMEOUT_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class StudySummary:
    """One line of the list of studies."""

    name: str
    created_at: str
    trials: int
    trials_wanted: int
    ok: int


class StudyStore:
    """The studies of one database. Raises StorageUnavailable when it cannot be used."""

    def __init__(self, url: str = DEFAULT_STORAGE, *, create: bool = False) -> None:
        self.url = shown_url(url)
        """The database's URL as it may be shown: without its password."""
        with _storage_errors(url):
            self._engine = _make_engine(url, create=create)
            if create:
                METADATA.create_all(self._engine)
            elif not sqlalchemy.inspect(self._engine).has_table(STUDIES.name):
                raise UnknownStudy(f"there are no studies in {self.url}", hint="begin one with: autotune search")

    def close(self) -> None:
        self._engine.dispose()

    # -- studies -----------------------------------------------------------------------------------------------

    def create_study(self, definition: StudyDefinition, *, trials_wanted: int) -> None:
        row = {
            "schema_version": SCHEMA_VERSION,
            "name": definition.name,
            "workload": definition.workload.to_dict(),
            "space": definition.space.to_dict(),
            "device": asdict(definition.device),
            "unavailable": definition.unavailable,
            "cap_bytes": definition.cap_bytes,
            "seed": definition.seed,
            "sampler": definition.sampler,
            "trials_wanted": trials_wanted,
        }
        try:
            with self._writing() as connection:
                connection.execute(insert(STUDIES).values(row))
        except IntegrityError:
            raise StudyMismatch(
                f"study {definition.name!r} was begun by another search just now", hint="run the command again"
            ) from None

    def set_trials_wanted(self, study: str, trials_wanted: int) -> None:
        with self._writing() as connection:
            connection.execute(update(STUDIES).where(STUDIES.c.name == study).values(trials_wanted=trials_wanted))

    def has_study(self, study: str) -> bool:
        with self._reading() as connection:
            return connection.scalar(select(STUDIES.c.id).where(STUDIES.c.name == study)) is not None

    def definition(self, study: str) -> tuple[StudyDefinition, int]:
        """The study's definition and how many trials were wanted of it. Raises UnknownStudy."""
        with self._reading() as connection:
            row = connection.execute(select(STUDIES).where(STUDIES.c.name == study)).one_or_none()
            if row is None:
                names = connection.scalars(select(STUDIES.c.name).order_by(STUDIES.c.id)).all()
                raise UnknownStudy(
                    f"there is no study {study!r} in {self.url}",
                    hint=f"there is {', '.join(names)}" if names else "begin one with: autotune search",
                )
            if row.schema_version != SCHEMA_VERSION:
                raise StorageUnavailable(
                    f"study {study!r} has schema {row.schema_version}, this autotune reads {SCHEMA_VERSION}",
                    hint="use the autotune version that wrote it",
                )
            definition = StudyDefinition(
                name=row.name,
                workload=Workload(**row.workload),
                space=SearchSpace.from_dict(row.space),
                device=DeviceInfo(**row.device),
                unavailable=row.unavailable,
                cap_bytes=row.cap_bytes,
                seed=row.seed,
                sampler=row.sampler,
            )
            return definition, row.trials_wanted

    def studies(self) -> list[StudySummary]:
        """All studies, oldest first."""
        with self._reading() as connection:
            rows = connection.execute(select(STUDIES).order_by(STUDIES.c.id)).all()
        summaries = []
        for row in rows:
            records = [record for record in self.trials(row.name) if record.is_finished]
            summaries.append(
                StudySummary(
                    name=row.name,
                    created_at=f"{row.created_at:%Y-%m-%d %H:%M}",
                    trials=len(records),
                    trials_wanted=row.trials_wanted,
                    ok=sum(record.feasible for record in records),
                )
            )
        return summaries

    # -- trials ------------------------------------------------------------------------------------------------

    def trials(self, study: str) -> list[TrialRecord]:
        """Every trial of the study in the order of its number; one without a result reads as interrupted."""
        with self._reading() as connection:
            rows = connection.execute(
                select(TRIALS, STUDIES.c.cap_bytes)
                .join(STUDIES)
                .where(STUDIES.c.name == study)
                .order_by(TRIALS.c.number)
            ).all()
            return [_record(row) for row in rows]

    def begin_trial(self, study: str, number: int, config: TrainingConfig, *, name: str | None) -> None:
        """Takes down that this configuration is being run. One that was begun before keeps its row."""
        with self._writing() as connection:
            study_id = connection.scalar(select(STUDIES.c.id).where(STUDIES.c.name == study))
            known = select(TRIALS.c.id).where(TRIALS.c.study_id == study_id, TRIALS.c.number == number)
            if connection.scalar(known) is None:
                row = {
                    "study_id": study_id,
                    "number": number,
                    "fingerprint": config.fingerprint,
                    "name": name,
                    "config": config.to_dict(),
                }
                connection.execute(insert(TRIALS).values(row))

    def finish_trial(self, study: str, number: int, measurement: Measurement, *, seconds: float) -> None:
        """Keeps the result. When this returns it is on disk."""
        study_id = select(STUDIES.c.id).where(STUDIES.c.name == study).scalar_subquery()
        with self._writing() as connection:
            connection.execute(
                update(TRIALS)
                .where(TRIALS.c.study_id == study_id, TRIALS.c.number == number)
                .values(measurement=asdict(measurement), seconds=seconds, finished_at=sqlalchemy.func.now())
            )

    # -- connections -------------------------------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with _storage_errors(self.url), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        with _storage_errors(self.url), self._engine.begin() as connection:
            yield connection


def _record(row: Any) -> TrialRecord:
    measurement = row.measurement or asdict(Measurement(outcome="interrupted", message="has no result yet"))
    device_bytes = measurement["device_bytes"]
    return TrialRecord(
        **measurement,
        number=row.number,
        config=TrainingConfig(**row.config),
        name=row.name,
        feasible=measurement["outcome"] == "ok" and device_bytes is not None and device_bytes <= row.cap_bytes,
        perplexity_source=None if measurement["perplexity"] is None else "measured",
        seconds=row.seconds,
    )


def sqlite_file(url: str) -> Path | None:
    """The file behind a SQLite URL; None for another database or one in memory."""
    with _storage_errors(url):
        parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database == ":memory:":
        return None
    return Path(parsed.database)


def _make_engine(url: str, *, create: bool) -> Engine:
    file = sqlite_file(url)
    if file is None:
        return create_engine(url)
    if create:
        file.parent.mkdir(parents=True, exist_ok=True)
    elif not file.is_file():
        what = "a folder, not a studies database" if file.is_dir() else "not there"
        raise UnknownStudy(f"the studies database {file} is {what}", hint="begin a study with: autotune search")
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_SECONDS})
    event.listen(engine, "connect", _durable_sqlite)
    return engine


def _durable_sqlite(connection: Any, _record: Any) -> None:
    """WAL lets readers and a writer work side by side; FULL syncs every commit to disk."""
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA foreign_keys=ON")


@contextmanager
def _storage_errors(url: str) -> Iterator[None]:
    try:
        yield
    except IntegrityError:
        raise
    except (ArgumentError, NoSuchModuleError) as error:
        raise StorageUnavailable(
            f"{shown_url(url)!r} is not a database URL: {_first_line(error)}",
            hint="write for example sqlite:///studies/autotune.db, or leave --storage out",
        ) from None
    except ImportError as error:
        package = {"psycopg": "psycopg[binary]", "MySQLdb": "mysqlclient"}.get(error.name or "", error.name)
        raise StorageUnavailable(
            f"the database driver {error.name!r} for {shown_url(url)!r} is not installed",
            hint=f'install it with: pip install "{package}"',
        ) from None
    except DBAPIError as error:
        raise StorageUnavailable(
            f"the studies database {shown_url(url)} cannot be used: {_first_line(error.orig or error)}",
            hint="check that it is an autotune database and that its folder can be written to, or name another "
            "with --storage",
        ) from None
    except (SQLAlchemyError, ValueError, TypeError, KeyError) as error:  # the latter from rows that are damaged
        raise StorageUnavailable(
            f"the studies database {shown_url(url)} cannot be used: {_first_line(error)}",
            hint="bring back a copy that is whole, or name another with --storage",
        ) from None
    except OSError as error:
        raise StorageUnavailable(
            f"the studies database {shown_url(url)} cannot be used: {error.strerror or error}",
            hint="choose a folder that can be written to, or name another database with --storage",
        ) from None


def shown_url(url: str) -> str:
    """`url` without its password."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return url


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]
