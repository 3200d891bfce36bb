"""The folder of a database, for logs, prepared files, compiler caches and results on their way."""

from contextlib import closing

import pytest
import sqlalchemy
from sqlalchemy.engine import make_url

from autotune.errors import InvalidInput, StorageUnavailable
from autotune.spec.attempt import FinishedTrial
from autotune.storage.database import Database, with_driver
from autotune.storage.identity import find_work_folder
from autotune.study.check import check_studies
from autotune.study.opening.work_folder import work_folder
from autotune.study.workers.outbox import OUTBOX_FOLDER, Outbox, OutboxResult
from tests.building.studies import definition, measured, open_store


def refused_once_the_trial_server_began(storage):
    with work_folder(storage) as work:
        (work / "logs").mkdir()
        (work / "inductor").mkdir()  # torch makes it when it is imported
        raise InvalidInput("it cannot be done as asked")


def test_a_rejected_request_leaves_no_folder(tmp_path):
    with pytest.raises(InvalidInput):
        refused_once_the_trial_server_began(f"sqlite:///{tmp_path}/new/autotune.db")
    assert list(tmp_path.iterdir()) == []


# -- of a database on a server ---------------------------------------------------------------------


@pytest.fixture
def url(postgres_url, tmp_path, monkeypatch):
    """A database on a server with one study; the current folder is an empty one."""
    monkeypatch.chdir(tmp_path)
    with open_store(postgres_url) as store:
        store.create_study(definition(), trials_wanted=3)
    return postgres_url


def spelled_otherwise(url):
    """Returns a URL of the same database, with its driver and another password."""
    other = with_driver(make_url(url)).set(password="changed", query={"application_name": "me"})
    return other.render_as_string(hide_password=False)


def set_identity(url, *rows):
    engine = sqlalchemy.create_engine(with_driver(make_url(url)))
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("DELETE FROM autotune_identity"))
        for number, row in enumerate(rows):
            connection.execute(
                sqlalchemy.text("INSERT INTO autotune_identity VALUES (:id, :identity)"),
                {"id": number, "identity": row},
            )
    engine.dispose()


def test_a_database_has_one_work_folder_however_it_is_spelled(url):
    assert spelled_otherwise(url) != url
    assert find_work_folder(spelled_otherwise(url)) == find_work_folder(url)


def test_a_result_that_waits_is_found_again_by_another_spelling(url):
    finished = FinishedTrial(measurement=measured(), seconds=1.0)
    result = OutboxResult(attempt_id="1" * 32, number=0, finished=finished)
    with work_folder(url) as work:
        Outbox(work / "by-hand" / OUTBOX_FOLDER).put(result)
    (finding,) = check_studies(spelled_otherwise(url)).findings
    assert "the finished result" in finding.what


def test_two_databases_have_two_work_folders(tmp_path):
    identities = set()
    for name in ("a", "b"):
        with open_store(f"sqlite:///{tmp_path}/{name}.db") as store:
            identities.add(store.database.identity)
    assert len(identities) == 2
    assert None not in identities


def test_the_password_is_in_no_name_of_a_folder(url):
    with work_folder(url) as work, closing(Database(url, read_only=True)) as database:
        assert work.name == database.identity


@pytest.mark.parametrize(
    "rows",
    [[], ["../../somewhere"], ["0" * 31 + "/"], ["0" * 32, "1" * 32]],
    ids=["none", "a path", "a slash", "two"],
)
def test_an_identity_that_is_none_names_no_folder(url, rows):
    set_identity(url, *rows)
    with pytest.raises(StorageUnavailable, match="has lost its identity"), work_folder(url):
        pass


def test_a_check_reports_a_lost_identity(url):
    set_identity(url, "../../somewhere")
    (finding,) = check_studies(url).findings
    assert "has lost its identity: the table autotune_identity has" in finding.what
