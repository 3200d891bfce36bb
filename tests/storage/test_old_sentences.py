"""Results of releases that stored sentences about where they come from are as they were.

`schema-2.db` has a result of each kind, as the last such release wrote it; `schema-2.show.json` is
what that release printed for `autotune show sentences --json`.
"""

import json
import shutil
import sqlite3
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest
import sqlalchemy

from autotune.errors import StorageUnavailable
from autotune.spec.provenance import MEASURED
from tests.building.old_databases import DATA, copy_to_postgres
from tests.building.studies import measured, open_store
from tests.building.whole_study import run_command

OLD = DATA / "schema-2.db"
SHOWN = (DATA / "schema-2.show.json").read_text()
TRIALS_SHOWN = json.loads(SHOWN)["trials"]
STUDY = "sentences"
TABLES = ("autotune_studies", "autotune_trials", "autotune_attempts", "autotune_predictions")


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copy(OLD, tmp_path))


@pytest.fixture
def url(file):
    return f"sqlite:///{file.name}"


@pytest.fixture
def old_postgres(postgres_url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the copy goes
    copy_to_postgres(OLD, postgres_url, revision="0002", tables=TABLES)
    return postgres_url


@pytest.fixture(params=["sqlite", "postgresql"])
def old(request):
    return request.getfixturevalue("url" if request.param == "sqlite" else "old_postgres")


def stored_measurements(url):
    """Returns the measurements of all trials and attempts, as the database has them."""
    engine = sqlalchemy.create_engine(url)
    tables = sqlalchemy.MetaData()
    with engine.connect() as connection:
        tables.reflect(connection, only=["autotune_trials", "autotune_attempts"])
        columns = [
            tables.tables[name].c.measurement for name in ("autotune_trials", "autotune_attempts")
        ]
        found = [
            measurement
            for column in columns
            for measurement in connection.scalars(sqlalchemy.select(column))
        ]
    engine.dispose()
    return [one for one in found if one is not None]


def without_later_fields(trials):
    """Returns the trials with the fields and techniques of when the old database was made."""
    found = []
    for shown, before in zip(trials, TRIALS_SHOWN, strict=True):
        earlier = {name: shown[name] for name in before}
        earlier["config"] = {field: shown["config"][field] for field in before["config"]}
        found.append(earlier)
    return found


def change_trial(file, number, measurement):
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(
            "UPDATE autotune_trials SET measurement = CAST(? AS TEXT) WHERE number = ?",
            (measurement, number),
        )


# -- databases -------------------------------------------------------------------------------------


def test_show_prints_what_it_printed_before_but_for_later_settings(url, monkeypatch, capsys):
    code, out, _ = run_command(monkeypatch, capsys, "show", STUDY, "--json", "--storage", url)
    shown, before = json.loads(out), json.loads(SHOWN)
    for part in ("workload", "device"):
        shown[part] = {name: shown[part][name] for name in before[part]}
    shown["trials"] = without_later_fields(shown["trials"])
    assert shown.pop("initial_perplexity") is None
    # Trials 1 to 3 have other numbers of seeds than the study, and are not compared any more.
    for result in (shown, before):
        result["pick_reason"] = ""
        result["front"] = sorted(set(result["front"]) - {1, 2, 3})
        for of_other_seeds in result["trials"][1:4]:
            of_other_seeds.update(dict.fromkeys(("perplexity", "perplexity_spread", "feasible")))
            of_other_seeds["perplexity_source"] = ""
    assert (code, shown) == (0, before)


def test_every_result_says_what_it_said_before_the_upgrade(old):
    with open_store(old, create=False) as store:
        records = store.trials(STUDY)
    assert without_later_fields([record.to_dict() for record in records]) == TRIALS_SHOWN


def test_after_the_upgrade_no_row_has_a_sentence(old):
    with open_store(old, create=False):
        pass
    measurements = stored_measurements(old)
    facts = [one[name] for one in measurements for name in ("perplexity_source", "reused_from")]
    assert len(measurements) == 15
    assert {type(fact) for fact in facts} == {dict, type(None)}


@pytest.mark.parametrize(
    "damaged",
    [
        "{no JSON",
        "[1]",
        "[" * 100_000,
        json.dumps({"perplexity_source": f"shared with trial {'9' * 5000}"}),
        json.dumps({"reused_from": f"trial 1 of study {'(' * 100_000}"}),
    ],
    ids=["not-json", "a-list", "deep", "huge-number", "huge-name"],
)
def test_a_row_that_cannot_be_read_keeps_no_other_from_being_upgraded(file, url, damaged):
    change_trial(file, 4, damaged)
    with open_store(url, create=False):
        pass
    change_trial(file, 4, json.dumps(asdict(measured())))
    assert all(not isinstance(one["perplexity_source"], str) for one in stored_measurements(url))


def test_a_database_that_an_older_search_is_using_is_not_upgraded(old):
    engine = sqlalchemy.create_engine(old)
    attempts = sqlalchemy.table(
        "autotune_attempts", *map(sqlalchemy.column, ("id", "state", "lease_until"))
    )
    with engine.begin() as connection:
        first = connection.scalar(sqlalchemy.select(attempts.c.id).limit(1))
        connection.execute(
            attempts.update()
            .where(attempts.c.id == first)
            .values(state="running", lease_until=time.time() + 60.0)
        )
    engine.dispose()
    with pytest.raises(
        StorageUnavailable, match="a search or a server of that autotune is using it"
    ):
        open_store(old, create=False).__enter__()


def test_a_mean_whose_further_seeds_all_failed_was_measured_once(file, url):
    stored = {**asdict(measured()), "perplexity_source": "measured, mean of 1 seeds"}
    change_trial(file, 4, json.dumps(stored))
    with open_store(url, create=False) as store:
        assert store.trials(STUDY)[4].perplexity_source == MEASURED
