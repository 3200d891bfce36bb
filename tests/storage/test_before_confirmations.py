"""A database and an export of the release before confirmations: all is read, nothing is changed.

`schema-3.db` has a study with one of everything that there was, and `format-2.jsonl` is what that
release exported of it.
"""

import json
import shutil
from datetime import datetime
from pathlib import Path

import pytest
import sqlalchemy

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
