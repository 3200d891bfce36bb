"""Borders of stored studies: rows of a database, the file of an import, results in an outbox."""

import hashlib
import io
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import strategies

from autotune.errors import InvalidInput, StorageUnavailable, StudyMismatch
from autotune.spec.attempt import FinishedTrial
from autotune.spec.config import TrainingConfig
from autotune.spec.provenance import FailedSeed, PerplexitySource, TrialReference
from autotune.storage.store import StudyStore
from autotune.storage.transfer import add_studies, read_file, read_studies, write_file
from autotune.study.workers.outbox import Outbox, OutboxConfirmation, OutboxResult
from tests.building.studies import MIB, definition, measured
from tests.building.whole_study import CONFIRMATIONS, write_whole_study
from tests.fuzzing.judging import Border, Reader, quick_folder
from tests.fuzzing.mutations import (
    Verbatim,
    changed_bytes,
    changed_files,
    changed_trees,
    json_bytes,
    json_text,
    with_changed_bytes,
)
from tests.fuzzing.showing import printed, used, used_in_full

STUDY = "by-hand"


DATABASE = "autotune.db"
SELDOM = 200
"""Of so many inputs one is also drawn, and written as a page and for every trainer."""


def _url_in(folder: Path) -> str:
    return f"sqlite:///{folder / DATABASE}"


def _connected(file: Path) -> sqlite3.Connection:
    """Returns a connection without transactions that waits for no disk."""
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("PRAGMA synchronous=OFF")
    return connection


def _is_one_in(number: int, given: object) -> bool:
    """Whether an input is one of a fixed share, so that it stays so when it is tried again."""
    digest = hashlib.sha256(repr(given).encode(errors="replace")).digest()
    return int.from_bytes(digest[:4], "big") % number == 0


# -- the file of an import -------------------------------------------------------------------------


@cache
def _exported() -> bytes:
    with TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/autotune.db"
        write_whole_study(url)
        with closing(StudyStore(url)) as store:
            file = io.BytesIO()
            write_file(read_studies(store.database, [STUDY]), file)
            return file.getvalue()


@strategies.composite
def _import_files(draw: Any) -> bytes:
    """Mostly a row is changed; SQLite checks nothing but constraints, which then leave it."""
    if draw(strategies.sampled_from((True, True, True, True, False))):
        row = json.loads(draw(_row_inputs(_TABLES)))
        with TemporaryDirectory() as folder:
            file = Path(folder) / DATABASE
            file.write_bytes(_exported())
            with closing(_connected(file)) as connection, suppress(sqlite3.IntegrityError):
                connection.execute("PRAGMA journal_mode=DELETE")
                _update(connection, row["table"], row["rowid"], row["columns"])
            return file.read_bytes()
    return draw(changed_bytes([_exported()]))


class _Imports(Reader):
    """Imports a file into an empty database, and uses the study."""

    def __init__(self, folder: Path, store: StudyStore) -> None:
        self._folder = folder
        self._store = store

    def _written(self, given: bytes) -> Path:
        file = self._folder / "studies.db"
        file.write_bytes(given)
        return file

    def passes_first_check(self, given: bytes) -> bool:
        try:
            with closing(_connected(self._written(given))) as connection:
                return connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        except sqlite3.Error:
            return False

    def read(self, given: bytes) -> Iterator[str]:
        with closing(_connected(self._folder / DATABASE)) as connection:
            connection.execute("PRAGMA foreign_keys=ON")
            connection.execute("DELETE FROM autotune_studies")
        studies = read_file(self._written(given))
        add_studies(self._store.database, studies)
        for study in studies:
            yield from used(self._store, study.name)
            if _is_one_in(SELDOM, given):
                yield from used_in_full(_url_in(self._folder), study.name, self._folder)


@contextmanager
def _reading_imports(folder: Path) -> Iterator[Reader]:
    with closing(StudyStore(_url_in(folder), create=True)) as store:
        yield _Imports(folder, store)


IMPORT_FILE = Border(
    first_check="SQLite finds no damage in it",
    inputs=_import_files,
    valid=lambda: [_exported()],
    reader=_reading_imports,
    modules=("storage/transfer.py",),
    errors=(InvalidInput, StudyMismatch),
)


# -- results that wait in an outbox ----------------------------------------------------------------


@cache
def _outbox_files() -> tuple[Any, ...]:
    """Returns what the files of an outbox have: two results of trials, and each confirmation."""
    with quick_folder() as folder:
        outbox = Outbox(folder)
        for number, measurement in enumerate((_MEASURED, _FAILED)):
            finished = FinishedTrial(measurement=measurement, seconds=1.5)
            outbox.put(OutboxResult(attempt_id=_ID, number=number, finished=finished))
            (folder / f"{_ID}.json").rename(folder / f"{number}.kept")
        for number, confirmation in enumerate(CONFIRMATIONS):
            outbox.put(OutboxConfirmation(id=_ID, study_begun="now", confirmation=confirmation))
            (folder / f"{_ID}.json").rename(folder / f"of-{number}.kept")
        return tuple(json.loads(file.read_text()) for file in sorted(folder.glob("*.kept")))


_ID = "0123456789abcdef0123456789abcdef"
_MEASURED = measured(
    peak_reserved_bytes=50 * MIB,
    bytes_by_kind={"parameters": 10, "buffers": 1, "optimizer": 20},
    seconds_by_part={"startup": 1.0, "training": 2.0},
    perplexity_source=PerplexitySource(
        kind="measured", seeds=2, failed_seeds=(FailedSeed(seed=3, reason="it crashed"),)
    ),
    reused_from=TrialReference(number=3, study="earlier"),
)
_FAILED = measured(outcome="out_of_memory", message="no room", requested_bytes=MIB, perplexity=None)


class _Outboxes(Reader):
    """Delivers the results of an outbox as a search does when it begins."""

    def __init__(self, folder: Path, store: StudyStore) -> None:
        self._folder = folder / "outbox"
        self._folder.mkdir()
        self._outbox = Outbox(self._folder)
        self._store = store

    def passes_first_check(self, given: bytes) -> bool:
        try:
            content = json.loads(given.decode())
        except (ValueError, RecursionError):
            return False
        return isinstance(content, dict) and bool({"measurement", "confirmation"} & set(content))

    def read(self, given: bytes) -> Iterator[str]:
        (self._folder / f"{_ID}.json").write_bytes(given)
        config = TrainingConfig(micro_batch_size=8)
        attempt = self._store.attempts.claim(
            STUDY, config, worker="by hand", attempt_id=_ID, most_trials=10
        )
        assert attempt is not None
        try:
            delivered = list(self._outbox.waiting())
            for entry in delivered:
                self._deliver(entry)
            yield from used(self._store, STUDY)
            assert not list(self._folder.glob("*.json"))
            left = self._outbox.left_over()
            if left:
                assert not delivered
                assert left[0].read_bytes() == given
                raise SetAside(f"{left[0].name} stays")
        finally:
            for file in self._folder.iterdir():
                file.unlink()
            with closing(_connected(self._folder.parent / DATABASE)) as connection:
                connection.execute("PRAGMA foreign_keys=ON")
                connection.execute("DELETE FROM autotune_trials")
                connection.execute("DELETE FROM autotune_confirmations")

    def _deliver(self, entry: OutboxResult | OutboxConfirmation) -> None:
        if isinstance(entry, OutboxConfirmation):
            self._store.add_confirmation(STUDY, entry.confirmation, confirmation_id=entry.id)
            self._outbox.settle(entry.id, "stored")
        else:
            finished = entry.finished
            delivery = self._store.attempts.finish(
                entry.attempt_id, finished.measurement, seconds=finished.seconds
            )
            self._outbox.settle(entry.id, delivery)


class SetAside(Exception):
    """A file that is not a result was renamed, and is reported."""


@contextmanager
def _reading_outboxes(folder: Path) -> Iterator[Reader]:
    with closing(StudyStore(_url_in(folder), create=True)) as store:
        store.create_study(definition(STUDY), trials_wanted=4)
        yield _Outboxes(folder, store)


OUTBOX = Border(
    first_check="it is a JSON object with a measurement or a confirmation",
    inputs=lambda: changed_files(_outbox_files(), json_bytes),
    valid=lambda: [json_bytes(content) for content in _outbox_files()],
    reader=_reading_outboxes,
    modules=("study/workers/outbox.py", "storage/rows.py", "spec/reading.py"),
    errors=(SetAside,),
)


# -- rows of a database ----------------------------------------------------------------------------


class NotStorable(Exception):
    """The database itself rejects such a row."""


_TABLES = (
    "autotune_studies",
    "autotune_trials",
    "autotune_predictions",
    "autotune_attempts",
    "autotune_confirmations",
)
_OF_KEYS = ("id", "study_id", "trial_id")
_NUMBERS = ("INTEGER", "FLOAT", "BIGINT")


@cache
def _database() -> bytes:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "autotune.db"
        write_whole_study(f"sqlite:///{file}")
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("PRAGMA journal_mode=DELETE")
        return file.read_bytes()


@cache
def _types(table: str) -> dict[str, str]:
    """Returns the declared type of each column that an input has."""
    with _opened_copy() as connection:
        described = connection.execute(f"PRAGMA table_info({table})").fetchall()
    return {name: kind for _, name, kind, *_ in described if name not in _OF_KEYS}


@contextmanager
def _opened_copy() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.deserialize(_database())
        connection.row_factory = sqlite3.Row
        yield connection


@cache
def _rows(*tables: str) -> list[dict[str, Any]]:
    """Returns the rows of tables with their JSON as trees, and the place of each."""
    found = []
    with _opened_copy() as connection:
        for table in tables:
            types = _types(table)
            for row in connection.execute(f"SELECT rowid AS place, * FROM {table}"):
                columns = {
                    name: json.loads(row[name]) if kind == "JSON" and row[name] else row[name]
                    for name, kind in types.items()
                }
                found.append({"table": table, "rowid": row["place"], "columns": columns})
    return found


def _row_bytes(row: dict[str, Any]) -> bytes:
    """Returns a row as an input: JSON in which the JSON columns, and what is nested, are text."""
    types = _types(row["table"])
    columns = {
        name: json_text(value)
        if isinstance(value, dict | list | Verbatim)
        or (types.get(name) == "JSON" and value is not None)
        else value
        for name, value in row["columns"].items()
    }
    return json_bytes({**row, "columns": columns})


@strategies.composite
def _row_inputs(draw: Any, tables: tuple[str, ...]) -> bytes:
    row = draw(strategies.sampled_from(_rows(*tables)))
    if draw(strategies.sampled_from((True, True, True, False))):
        columns = draw(changed_trees([row["columns"]]))
        return _row_bytes({**row, "columns": columns if isinstance(columns, dict) else {}})
    content = json.loads(_row_bytes(row))
    texts = [name for name, value in content["columns"].items() if isinstance(value, str)]
    name = draw(strategies.sampled_from(texts))
    changed = draw(with_changed_bytes(content["columns"][name].encode()))
    # Bytes that are no UTF-8 travel as surrogates, and are stored as they were.
    content["columns"][name] = changed.decode(errors="surrogateescape")
    return json_bytes(content)


class _Rows(Reader):
    """Puts a row in the place of the one that it was, and uses the database."""

    def __init__(self, folder: Path, store: StudyStore) -> None:
        self._folder = folder
        self._store = store
        self._originals = {
            (row["table"], row["rowid"]): json.loads(_row_bytes(row))["columns"]
            for row in _rows(*_TABLES)
        }

    def passes_first_check(self, given: bytes) -> bool:
        row = json.loads(given)
        types = _types(row["table"])
        for name, value in row["columns"].items():
            kind = types.get(name)
            if kind == "JSON" and value is not None and not _is_json(value):
                return False
            if kind in _NUMBERS and not isinstance(value, int | float | None):
                return False
        return bool(row["columns"])

    def read(self, given: bytes) -> Iterator[str]:
        row = json.loads(given)
        place = row["table"], row["rowid"]
        with closing(_connected(self._folder / DATABASE)) as connection:
            try:
                _update(connection, *place, row["columns"])
                yield from self._use(is_one_of_few=_is_one_in(SELDOM, given))
            except sqlite3.IntegrityError as error:
                raise NotStorable(str(error)) from error
            finally:
                _update(connection, *place, self._originals[place])

    def _use(self, *, is_one_of_few: bool) -> Iterator[str]:
        studies = self._store.studies()
        assert len(studies) == 1
        (study,) = studies
        if is_one_of_few:
            url = _url_in(self._folder)
            yield printed("studies", "check", "--storage", url)
            yield printed("studies", "--storage", url)
            yield from used_in_full(url, study.name, self._folder)
        yield from used(self._store, study.name)


def _update(
    connection: sqlite3.Connection, table: str, rowid: int, columns: dict[str, Any]
) -> None:
    types = _types(table)
    values = {name: _bound(value) for name, value in columns.items() if name in types}
    # SQLite stores any bytes as text, also those that are no UTF-8.
    places = ", ".join(
        f"{name} = CAST(? AS TEXT)" if isinstance(value, bytes) else f"{name} = ?"
        for name, value in values.items()
    )
    if places:
        update = f"UPDATE {table} SET {places} WHERE rowid = ?"
        connection.execute(update, (*values.values(), rowid))


def _bound(value: Any) -> Any:
    """Returns a value as SQLite takes it."""
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) >= 2**63):
        return str(value).encode()
    if isinstance(value, dict | list):
        return json.dumps(value).encode()
    return value.encode(errors="surrogatepass") if isinstance(value, str) else value


def _is_json(text: object) -> bool:
    try:
        json.loads(str(text))
    except (ValueError, RecursionError):
        return False
    return True


@contextmanager
def _reading_rows(folder: Path) -> Iterator[Reader]:
    (folder / DATABASE).write_bytes(_database())
    with closing(StudyStore(_url_in(folder))) as store:
        yield _Rows(folder, store)


def _border_of_rows(*tables: str, modules: tuple[str, ...]) -> Border:
    return Border(
        first_check="what is to be JSON is JSON, what is to be a number is a number or null, "
        "and some column is left",
        inputs=lambda: _row_inputs(tables),
        valid=lambda: [_row_bytes(row) for row in _rows(*tables)],
        reader=_reading_rows,
        modules=("storage/rows.py", "spec/reading.py", *modules),
        errors=(InvalidInput, StorageUnavailable, NotStorable),
    )


STUDY_ROW = _border_of_rows("autotune_studies", modules=("spec/study.py", "spec/workload.py"))
TRIAL_ROW = _border_of_rows("autotune_trials", modules=("spec/result.py",))
OTHER_ROWS = _border_of_rows(
    "autotune_predictions",
    "autotune_attempts",
    "autotune_confirmations",
    modules=("spec/prediction.py", "spec/confirmation.py"),
)
