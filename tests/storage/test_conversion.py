"""Databases of earlier versions are upgraded after a copy was made; later ones are rejected."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import insert, text, update

from autotune.analysis.queue_order import DeviceGroup
from autotune.errors import StorageUnavailable
from autotune.spec.config import TrainingConfig
from autotune.storage import schema
from autotune.storage.database import Database
from autotune.storage.searches import NewSearch, Searches
from autotune.storage.servers import RunningServer, Servers
from autotune.storage.tables import METADATA, REVISION, SEARCHES, SERVER, SERVERS, TOKENS, VERSION
from autotune.storage.tokens import Tokens
from autotune.study.check import check_studies
from tests.building.old_databases import DATA, copy_to_postgres, rows
from tests.building.studies import config, keep, measured, open_store

OLD = DATA / "schema-1.db"
STUDY = "before-attempts"
OUR_OLD_TABLES = ("autotune_studies", "autotune_trials", "autotune_predictions")


def backups(folder):
    return sorted(folder.glob(f"*before-{REVISION}-*"))


@pytest.fixture
def file(tmp_path):
    return Path(shutil.copy(OLD, tmp_path / "autotune.db"))


@pytest.fixture
def url(file):
    return f"sqlite:///{file}"


@pytest.fixture
def old_postgres(postgres_url, tmp_path, monkeypatch):
    """The same database on PostgreSQL, with the tables of its revision."""
    monkeypatch.chdir(tmp_path)  # where the copy goes
    copy_to_postgres(OLD, postgres_url, revision="0001", tables=OUR_OLD_TABLES)
    return postgres_url


@pytest.fixture(params=["sqlite", "postgresql"])
def old(request):
    """An old database, once of each kind."""
    return request.getfixturevalue("url" if request.param == "sqlite" else "old_postgres")


# -- what is kept ----------------------------------------------------------------------------------


def test_every_result_of_an_old_database_is_as_it_was(old):
    before = rows(OLD, "autotune_trials")
    with open_store(old, create=False) as store:
        definition, wanted = store.definition(STUDY)
        records = store.trials(STUDY)
    (study,) = rows(OLD, "autotune_studies")
    assert (definition.cap_bytes, definition.seed, definition.sampler, wanted) == tuple(
        study[column] for column in ("cap_bytes", "seed", "sampler", "trials_wanted")
    )
    assert [(one.number, one.name, one.seconds) for one in records] == [
        (row["number"], row["name"], row["seconds"]) for row in before
    ]
    assert [one.config for one in records] == [
        TrainingConfig(**json.loads(row["config"])) for row in before
    ]
    for record, row in zip(records, before, strict=True):
        if row["measurement"] is None:
            assert not record.is_finished
        else:
            measurement = json.loads(row["measurement"])
            shown = record.to_dict()
            assert {name: shown[name] for name in measurement} == measurement


def test_every_prediction_of_an_old_database_is_as_it_was(old):
    with open_store(old, create=False) as store:
        forecasts = store.forecasts(STUDY)
    before = {
        row["fingerprint"]: json.loads(row["prediction"])
        for row in rows(OLD, "autotune_predictions")
    }
    assert {
        fingerprint: one.prediction.peak_memory_bytes for fingerprint, one in forecasts.items()
    } == {
        fingerprint: prediction["peak_memory_bytes"] for fingerprint, prediction in before.items()
    }


def test_an_old_database_is_whole_once_it_was_opened_and_takes_the_result_it_lacks(old):
    with open_store(old) as store:
        (unfinished,) = [record for record in store.trials(STUDY) if not record.is_finished]
        keep(store, unfinished.config, measured(), study=STUDY)
        assert store.trials(STUDY)[unfinished.number].outcome == "ok"
    checked = check_studies(old)
    assert (checked.trials, checked.findings) == (7, ())


def test_looking_at_an_old_database_says_so_and_upgrades_nothing(old, tmp_path):
    checked = check_studies(old)
    assert (checked.studies, checked.faults) == ((), 0)
    assert "is of an older autotune" in checked.findings[0].what
    assert backups(tmp_path) == []
    assert check_studies(old).findings == checked.findings


def test_optunas_tables_stay_as_they_were(url, file):
    with open_store(url):
        pass
    for table in ("studies", "trials"):
        with closing(sqlite3.connect(file)) as new, closing(sqlite3.connect(OLD)) as old:
            query = f"SELECT * FROM {table}"
            assert new.execute(query).fetchall() == old.execute(query).fetchall()


# -- the copy --------------------------------------------------------------------------------------


def test_the_copy_next_to_an_old_file_has_every_row_unchanged(url, file):
    with open_store(url):
        pass
    (copy,) = backups(file.parent)
    with closing(sqlite3.connect(copy)) as new, closing(sqlite3.connect(OLD)) as old:
        assert list(new.iterdump()) == list(old.iterdump())


def test_the_copy_of_an_old_server_database_has_every_row_as_it_was(old_postgres, tmp_path):
    with open_store(old_postgres):
        pass
    (copy,) = backups(tmp_path / "studies")
    lines = [json.loads(line) for line in copy.read_text().splitlines()]
    for table in OUR_OLD_TABLES:
        kept = [{**line, "table": None} for line in lines if line["table"] == table]
        assert [(row["id"], row.get("config"), row.get("measurement")) for row in kept] == [
            (
                row["id"],
                *(
                    json.loads(row[one]) if row.get(one) else None
                    for one in ("config", "measurement")
                ),
            )
            for row in rows(OLD, table)
        ]


def test_what_is_only_in_the_log_is_in_the_copy_too(url, file):
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("UPDATE autotune_studies SET seed = 77")
        connection.commit()
        with open_store(url):
            pass
    (copy,) = backups(file.parent)
    assert rows(copy, "autotune_studies")[0]["seed"] == 77


def test_without_a_copy_nothing_is_upgraded(old_postgres, tmp_path):
    (tmp_path / "studies").touch()  # a file, where the copy's folder would be
    with (
        pytest.raises(StorageUnavailable, match=r"the copy .* cannot be written") as raised,
        open_store(old_postgres),
    ):
        pass
    assert raised.value.hint
    assert "is of an older autotune" in check_studies(old_postgres).findings[0].what


def test_a_damaged_old_database_is_not_upgraded(url, file):
    content = bytearray(file.read_bytes())
    content[4096 * 3 : 4096 * 4] = bytes(4096)
    file.write_bytes(content)
    with pytest.raises(StorageUnavailable) as raised, open_store(url):
        pass
    assert raised.value.hint
    assert backups(file.parent) == []


@pytest.mark.parametrize("holder", ["server", "search"])
def test_a_database_is_not_upgraded_while_a_server_leads_or_runs_a_search(store_url, holder):
    with open_store(store_url) as store:
        queue = Searches(store.database)
        epoch = queue.take_lead("a server", version="1")
        if holder == "search":
            queue.submit(NewSearch(request={}, submitted_by="ada"))
            queue.claim_next(DeviceGroup(), version="1")
            queue.give_lead(epoch)
        with store.database.writing() as connection:
            connection.execute(update(VERSION).values(version_num="0005"))
    with (
        pytest.raises(StorageUnavailable, match="a search or a server of that autotune is using"),
        open_store(store_url),
    ):
        pass


# -- once, whole or not at all ---------------------------------------------------------------------

OPEN = (
    "import sys; from autotune.storage.store import StudyStore; "
    "sys.stdin.readline(); StudyStore(sys.argv[1]).close()"
)


def opening(url, **variables):
    return subprocess.Popen(
        [sys.executable, "-c", OPEN, url],
        stdin=subprocess.PIPE,
        env={**os.environ, **variables},
        text=True,
    )


def test_several_processes_that_open_an_old_database_at_once_upgrade_it_once(old, tmp_path):
    processes = [opening(old) for _ in range(2)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    for process in processes:
        process.stdin.close()
    assert len(backups(tmp_path) + backups(tmp_path / "studies")) == 1
    assert check_studies(old).findings == ()


@pytest.mark.parametrize("look", ["revision_of", "tables_of"])
def test_tables_that_another_process_creates_between_two_checks_are_used(
    store_url, monkeypatch, look
):
    looked = getattr(schema, look)

    def made_just_before(*arguments):
        monkeypatch.undo()
        with open_store(store_url):
            return looked(*arguments)

    Database(store_url, create=True).close()
    monkeypatch.setattr(schema, look, made_just_before)
    with open_store(store_url) as store:
        assert store.names() == []


@pytest.mark.parametrize("point", ["schema backed up", "schema upgraded, not committed"])
def test_an_upgrade_that_was_killed_is_done_by_the_next_to_open(url, file, point):
    process = opening(url, AUTOTUNE_FAILPOINT=point)
    process.communicate("go\n", timeout=60)
    assert process.returncode == -signal.SIGKILL
    with open_store(url, create=False) as store:
        assert len(store.trials(STUDY)) == 7
    assert check_studies(url).findings == ()
    assert all(len(rows(copy, "autotune_trials")) == 7 for copy in backups(file.parent))


def test_an_old_file_that_must_not_be_written_is_rejected_and_unchanged(file):
    before = file.read_bytes()
    url = f"sqlite:///file:{file}?mode=ro&uri=true"
    with (
        pytest.raises(StorageUnavailable, match=r"readonly|read-only") as raised,
        open_store(url, create=False),
    ):
        pass
    assert raised.value.hint
    assert file.read_bytes() == before
    assert backups(file.parent) == []


# -- the schema itself -----------------------------------------------------------------------------


def test_an_upgraded_database_has_the_tables_of_a_new_one(old):
    with open_store(old) as store, store._database.engine.connect() as connection:
        options = {
            "version_table": VERSION.name,
            "include_object": lambda _, name, kind, *__: is_ours(kind, name),
        }
        difference = compare_metadata(
            MigrationContext.configure(connection, opts=options), METADATA
        )
    assert difference == []


def is_ours(kind, name):
    return kind != "table" or name.startswith("autotune_")


def test_tokens_of_the_schema_before_webhooks_get_a_place_for_one(store_url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a copy of what was there before is written to
    with open_store(store_url) as store, store.database.writing() as connection:
        connection.execute(text(f"ALTER TABLE {TOKENS.name} DROP COLUMN webhook"))
        connection.execute(text(f"ALTER TABLE {SEARCHES.name} DROP COLUMN budget_seconds"))
        connection.execute(text(f"ALTER TABLE {SERVER.name} DROP COLUMN limits"))
        connection.execute(text(f"ALTER TABLE {SERVERS.name} DROP COLUMN device_groups"))
        connection.execute(update(VERSION).values(version_num="0008"))
        connection.execute(insert(TOKENS).values(name="ada", digest="a", role="admin"))
    with open_store(store_url) as store:
        (token,) = Tokens(store.database).all()
        assert (token.name, token.role, token.webhook) == ("ada", "admin", None)


def test_workers_enter_themselves_after_an_upgrade(store_url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    group = DeviceGroup(machine="here", kind="NVIDIA H200")
    known = {"digest": "d", "owner_digest": "", "address": "http://here", "host": "here"}
    with open_store(store_url) as store, store.database.writing() as connection:
        connection.execute(text(f"ALTER TABLE {SERVER.name} DROP COLUMN limits"))
        connection.execute(text(f"ALTER TABLE {SERVERS.name} DROP COLUMN device_groups"))
        connection.execute(update(VERSION).values(version_num="0009"))
    with open_store(store_url) as store:
        Servers(store.database).renew(RunningServer(**known, groups=(group,)))
        queue = Searches(store.database)
        assert (queue.groups(), queue.lead().limits) == ([group], {})


def test_a_later_schema_is_rejected_and_not_changed(url, file):
    with open_store(url):
        pass
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(f"UPDATE {VERSION.name} SET version_num = '9999'")
    with (
        pytest.raises(StorageUnavailable, match=rf"schema 9999, .* up to {REVISION}") as raised,
        open_store(url),
    ):
        pass
    assert "the autotune that wrote it, or a later one" in raised.value.hint
    assert len(backups(file.parent)) == 1


def test_an_old_study_shows_its_pick(url):
    from autotune import show

    assert show(STUDY, storage=url).pick.number == 3


def test_a_new_trial_of_an_old_study_gets_the_next_number(old):
    with open_store(old) as store:
        assert keep(store, config(5), study=STUDY).number == 7
