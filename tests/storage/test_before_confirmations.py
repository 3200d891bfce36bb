"""A database and an export of the release before confirmations: all is read, nothing is changed.

`schema-3.db` has a study with one of everything that there was, and `format-2.jsonl` is what that
release exported of it.
"""

import json
import shutil
import sqlite3
import time
from contextlib import closing
from datetime import datetime
from pathlib import Path

import pytest
import sqlalchemy

from autotune.errors import StorageUnavailable
from autotune.storage.tables import REVISION
from autotune.storage.transfer import read_studies
from autotune.study.check import check_studies
from tests.building.old_databases import DATA, copy_to_postgres
from tests.building.studies import open_store
from tests.building.whole_study import CONFIRMATIONS

OLD = DATA / "schema-3.db"
EXPORT = DATA / "format-2.jsonl"
STUDY = "before-confirmations"
TABLES = ("autotune_studies", "autotune_trials", "autotune_attempts", "autotune_predictions")


@pytest.fixture
def url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return f"sqlite:///{Path(shutil.copy(OLD, tmp_path)).name}"


@pytest.fixture
def old_postgres(postgres_url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the copy goes
    copy_to_postgres(OLD, postgres_url, revision="0003", tables=TABLES)
    return postgres_url


@pytest.fixture(params=["sqlite", "postgresql"])
def old(request):
    return request.getfixturevalue("url" if request.param == "sqlite" else "old_postgres")


def stored(store):
    """Returns the rows as that release has exported them: a JSON object for each, dates in UTC."""
    (study,) = read_studies(store.database)
    rows = [("study", {**study.study})]
    rows += [("trial", row) for row in study.trials]
    rows += [("prediction", row) for row in study.predictions]
    rows += [("attempt", {"trial": number, **row}) for number, row in study.attempts]
    del rows[0][1]["schema_version"]
    return [{"kind": kind, **{name: plain(row[name]) for name in row}} for kind, row in rows]


def plain(value):
    return f"{value:%Y-%m-%dT%H:%M:%S.%fZ}" if isinstance(value, datetime) else value


def of_the_earlier_release():
    return [json.loads(line) for line in EXPORT.read_text().splitlines()[1:-1]]


def test_after_the_upgrade_every_row_is_as_it_was(old):
    with open_store(old, create=False) as store:
        assert stored(store) == of_the_earlier_release()


def test_an_upgraded_study_takes_confirmations(old):
    with open_store(old, create=False) as store:
        assert store.confirmations(STUDY) == []
        store.add_confirmation(STUDY, CONFIRMATIONS[0], confirmation_id="a" * 32)
        assert store.confirmations(STUDY) == [CONFIRMATIONS[0]]
    assert check_studies(old).faults == 0


def test_an_earlier_release_rejects_the_upgraded_database_and_its_studies(url):
    """It would show unconfirmed speeds. It compares these two numbers with its own, 0003 and 3."""
    with open_store(url, create=False) as store, store._database.reading() as connection:
        version = connection.scalar(
            sqlalchemy.text("SELECT version_num FROM autotune_alembic_version")
        )
        of_studies = connection.scalars(
            sqlalchemy.text("SELECT schema_version FROM autotune_studies")
        )
        assert (version, list(of_studies)) == (REVISION, [4])


def test_the_copy_from_before_the_upgrade_lacks_the_new_table(url, tmp_path):
    with open_store(url, create=False):
        pass
    (copy,) = tmp_path.glob(f"*before-{REVISION}-*")
    with closing(sqlite3.connect(copy)) as new, closing(sqlite3.connect(OLD)) as old:
        assert list(new.iterdump()) == list(old.iterdump())


def test_the_copy_of_a_server_database_has_every_row(old_postgres, tmp_path):
    with open_store(old_postgres, create=False):
        pass
    (copy,) = (tmp_path / "studies").glob(f"*before-{REVISION}-*")
    tables = [json.loads(line)["table"] for line in copy.read_text().splitlines()]
    assert {name: tables.count(name) for name in TABLES} == {
        "autotune_studies": 1,
        "autotune_trials": 5,
        "autotune_attempts": 7,
        "autotune_predictions": 4,
    }


def test_checking_an_old_database_finds_its_age_and_no_fault(url):
    checked = check_studies(url)
    assert (checked.trials, checked.faults) == (5, 0)
    assert f"is of an older autotune (schema 0003, now {REVISION})" in checked.findings[0].what


def test_a_database_that_an_older_search_is_using_is_not_upgraded(url):
    engine = sqlalchemy.create_engine(url)
    columns = map(sqlalchemy.column, ("id", "state", "lease_until"))
    attempts = sqlalchemy.table("autotune_attempts", *columns)
    with engine.begin() as connection:
        connection.execute(
            attempts.update()
            .where(attempts.c.id == sqlalchemy.select(attempts.c.id).limit(1).scalar_subquery())
            .values(state="running", lease_until=time.time() + 60.0)
        )
    engine.dispose()
    with pytest.raises(StorageUnavailable, match="a search of that autotune is using it"):
        open_store(url, create=False).__enter__()
