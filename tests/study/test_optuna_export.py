"""A study as an Optuna study: what each outcome becomes, all or nothing, and what is rejected."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime
from typing import get_args
from wsgiref.util import setup_testing_defaults

import optuna
import pytest
import sqlalchemy
from optuna.trial import TrialState

import autotune
from autotune.errors import StorageUnavailable, StudyMismatch, UnknownStudy
from autotune.spec.confirmation import PairedSpeed, new_confirmation_id
from autotune.spec.result import Outcome
from autotune.study.optuna_export import export_to_optuna
from tests.building.commands import run_here
from tests.building.studies import (
    CAP_BYTES,
    MIB,
    SPACE,
    config,
    definition,
    keep,
    measured,
    open_store,
    write_study,
)

NOTHING = {
    "peak_memory_bytes": None,
    "device_bytes": None,
    "tokens_per_second": None,
    "tokens_per_second_spread": None,
    "perplexity": None,
}
OVER_CAP = {"peak_memory_bytes": 2 * CAP_BYTES, "device_bytes": 2 * CAP_BYTES}

MEASUREMENTS = {
    "ok": measured(),
    "out_of_memory": measured(outcome="out_of_memory", **NOTHING),
    "over_cap": measured(outcome="over_cap", **OVER_CAP),
    "predicted_over_cap": measured(outcome="predicted_over_cap", **NOTHING),
    "parity_failed": measured(outcome="parity_failed", **NOTHING),
    "dominated": measured(outcome="dominated", perplexity=None),
    "diverged": measured(outcome="diverged", **NOTHING),
    "timeout": measured(outcome="timeout", **NOTHING),
    "crashed": measured(outcome="crashed", message="it ended", **NOTHING),
    "interrupted": None,
}
STATES = {
    "ok": TrialState.COMPLETE,
    "out_of_memory": TrialState.PRUNED,
    "over_cap": TrialState.COMPLETE,
    "predicted_over_cap": TrialState.PRUNED,
    "parity_failed": TrialState.FAIL,
    "dominated": TrialState.PRUNED,
    "diverged": TrialState.FAIL,
    "timeout": TrialState.FAIL,
    "crashed": TrialState.FAIL,
}
WITH_A_RESULT = tuple(STATES)
NEEDS_TOO_MUCH = ("out_of_memory", "over_cap", "predicted_over_cap")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A studies database with `by-hand`, a trial of each outcome; the last has no result."""
    url = f"sqlite:///{tmp_path_factory.mktemp('studies')}/autotune.db"
    with open_store(url) as store:
        store.create_study(definition(), trials_wanted=len(MEASUREMENTS))
        for number, measurement in enumerate(MEASUREMENTS.values()):
            keep(store, _config(number), measurement, name=f"trial {number}", seconds=1.5)
    return url


def _config(number):
    """Returns a different configuration of the space for each number; number 0 is the baseline."""
    precision = ("fp32", "bf16-mixed")[number % 2]
    checkpointing = ("none", "block")[number // 2 % 2]
    fields = {"precision": precision, "checkpointing": checkpointing, "optimizer_fusion": "foreach"}
    return autotune.TrainingConfig(micro_batch_size=(8, 4, 2)[number // 4], **fields)


@pytest.fixture(scope="module")
def exported_file(url, tmp_path_factory):
    """The database to which the study was exported."""
    file = tmp_path_factory.mktemp("optuna") / "optuna.db"
    autotune.write_optuna_study("by-hand", f"sqlite:///{file}", storage=url)
    return file


@pytest.fixture(scope="module")
def exported(exported_file):
    """The study as Optuna loads it."""
    return optuna.load_study(study_name="by-hand", storage=f"sqlite:///{exported_file}")


def trial_of(study, outcome):
    (trial,) = [trial for trial in study.trials if trial.user_attrs["outcome"] == outcome]
    return trial


# -- what is exported ------------------------------------------------------------------------------


def test_the_table_has_every_outcome():
    assert set(MEASUREMENTS) == {*STATES, "interrupted"} == set(get_args(Outcome))


@pytest.mark.parametrize("outcome", WITH_A_RESULT)
def test_an_outcome_has_its_state(exported, outcome):
    assert trial_of(exported, outcome).state == STATES[outcome]


@pytest.mark.parametrize("outcome", WITH_A_RESULT)
def test_a_trial_has_values_only_if_all_of_them_were_measured(exported, outcome):
    values = trial_of(exported, outcome).values
    measurement = MEASUREMENTS[outcome]
    if STATES[outcome] == TrialState.COMPLETE:
        assert values == [measurement.peak_memory_bytes, 1000.0, 20.0]
    else:
        assert values is None


@pytest.mark.parametrize("outcome", WITH_A_RESULT)
def test_the_memory_constraint_is_violated_by_what_needs_too_much(exported, outcome):
    constraints = trial_of(exported, outcome).constraints
    assert (constraints["device_memory"] > 0) == (outcome in NEEDS_TOO_MUCH)


@pytest.mark.parametrize("outcome", WITH_A_RESULT)
def test_the_training_constraint_is_violated_by_what_failed(exported, outcome):
    constraints = trial_of(exported, outcome).constraints
    assert (constraints["training"] > 0) == (STATES[outcome] == TrialState.FAIL)


def test_all_trials_have_the_same_constraints_in_one_order(exported):
    (names,) = {tuple(trial.constraints) for trial in exported.trials}
    assert names[-2:] == ("device_memory", "training")


def test_the_best_trials_of_optuna_are_the_front(exported, url):
    front = autotune.show("by-hand", storage=url).front
    best = [trial.user_attrs["autotune_number"] for trial in exported.best_trials]
    assert sorted(best) == sorted(front)


def test_the_study_names_the_front_the_pick_and_the_baseline(exported, url):
    result = autotune.show("by-hand", storage=url)
    names = ("front", "pick", "baseline")
    assert [exported.user_attrs[name] for name in names] == [
        list(result.front),
        result.pick.number,
        result.baseline,
    ]


def test_the_objectives_have_their_directions_and_names(exported):
    assert [direction.name for direction in exported.directions] == [
        "MINIMIZE",
        "MAXIMIZE",
        "MINIMIZE",
    ]
    assert exported.metric_names == ["peak_memory_bytes", "tokens_per_second", "perplexity"]


@pytest.mark.parametrize("outcome", WITH_A_RESULT)
def test_the_parameters_are_the_choices_of_the_configuration(exported, outcome):
    trial = trial_of(exported, outcome)
    chosen = _config(trial.number).to_dict()
    assert trial.params == {field: chosen[field] for field in trial.params}


def test_the_distributions_have_the_values_of_the_search_space(exported):
    distributions = exported.trials[0].distributions
    assert {field: set(each.choices) for field, each in distributions.items()} == {
        "precision": {"fp32", "bf16-mixed"},
        "micro_batch_size": {1, 2, 4, 8},
        "checkpointing": {"none", "block"},
        "compile": {"none", "block"},
        "memory_budget": {1.0, 0.5},
    }


def test_a_configuration_outside_the_space_has_parameters_too(tmp_path):
    url, optuna_url = f"sqlite:///{tmp_path}/autotune.db", f"sqlite:///{tmp_path}/optuna.db"
    write_study(url, [measured()] * 2)  # micro batches of 8 and 7, which the space has not
    autotune.write_optuna_study("by-hand", optuna_url, storage=url)
    trials = optuna.load_study(study_name="by-hand", storage=optuna_url).trials
    assert [trial.params["micro_batch_size"] for trial in trials] == [8, 7]


def test_what_was_measured_of_a_trial_without_values_is_an_attribute(exported):
    attributes = trial_of(exported, "dominated").user_attrs
    assert attributes["peak_memory_bytes"] == 40 * MIB
    assert attributes["tokens_per_second"] == 1000.0


def test_the_whole_configuration_is_an_attribute(exported):
    for trial in exported.trials:
        assert trial.user_attrs["config"] == _config(trial.number).to_dict()


def test_trials_keep_their_numbers_where_none_before_them_is_left_out(exported):
    assert [trial.user_attrs["autotune_number"] for trial in exported.trials] == [
        trial.number for trial in exported.trials
    ]


def test_a_trial_without_a_result_is_left_out_and_named(url, tmp_path):
    with open_store(url) as store:
        (written,) = export_to_optuna(store, ["by-hand"], f"sqlite:///{tmp_path}/optuna.db")
    assert (written.trials, written.left_out) == (len(STATES), (len(STATES),))


def test_the_dates_are_those_of_the_trial_by_the_local_clock(exported, url):
    with open_store(url) as store:
        dates = store.trial_dates("by-hand")
    for trial in exported.trials:
        started, finished = (moment.astimezone(UTC) for moment in dates[trial.number])
        assert trial.datetime_start.astimezone(UTC) == started
        assert trial.datetime_complete.astimezone(UTC) == finished


def test_a_trial_began_before_it_finished_and_before_now(url):
    with open_store(url) as store:
        dates = store.trial_dates("by-hand").values()
    assert all(started <= finished <= datetime.now(UTC) for started, finished in dates)


def test_a_confirmed_speed_is_the_value(tmp_path):
    url, optuna_url = f"sqlite:///{tmp_path}/autotune.db", f"sqlite:///{tmp_path}/optuna.db"
    write_study(url, [measured(), measured(tokens_per_second=1200.0)])
    with open_store(url) as store:
        store.add_confirmation(
            "by-hand",
            PairedSpeed(
                config=config(1),
                partner=config(0),
                schedule="in turn",
                rounds=8,
                speed_ratio=1.02,
                partner_tokens_per_second=990.0,
                seconds=12.5,
            ),
            confirmation_id=new_confirmation_id(),
        )
    autotune.write_optuna_study("by-hand", optuna_url, storage=url)
    shown = autotune.show("by-hand", storage=url).trial(1).tokens_per_second
    study = optuna.load_study(study_name="by-hand", storage=optuna_url)
    assert study.trials[1].values[1] == shown != 1200.0


def test_a_study_that_only_names_configurations_has_parameters(tmp_path):
    url, optuna_url = f"sqlite:///{tmp_path}/autotune.db", f"sqlite:///{tmp_path}/optuna.db"
    named = dataclasses.replace(SPACE, techniques={}, conditions=())
    write_study(url, [measured()] * 3, space=named)
    autotune.write_optuna_study("by-hand", optuna_url, storage=url)
    study = optuna.load_study(study_name="by-hand", storage=optuna_url)
    assert [trial.params for trial in study.trials] == [
        {"micro_batch_size": size} for size in (8, 7, 6)
    ]


@pytest.mark.parametrize("sampler", ["TPESampler", "NSGAIISampler"])
def test_a_sampler_of_optunas_goes_on_from_it(exported_file, tmp_path, sampler):
    optuna_url = f"sqlite:///{shutil.copy(exported_file, tmp_path)}"
    study = optuna.load_study(
        study_name="by-hand", storage=optuna_url, sampler=getattr(optuna.samplers, sampler)(seed=0)
    )
    trial = study.ask(study.trials[0].distributions)
    assert trial.number == len(STATES)


# -- all of it, or nothing -------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "postgresql"])
def optuna_url(request, tmp_path):
    """The URL of a new Optuna database, once per kind of database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/optuna.db"
    return request.getfixturevalue("postgres_url")


def names_in(url):
    return optuna.get_all_study_names(url)


@pytest.mark.slow
def test_all_of_a_study_is_written_to_every_kind_of_database(url, optuna_url):
    autotune.write_optuna_study("by-hand", optuna_url, storage=url)
    study = optuna.load_study(study_name="by-hand", storage=optuna_url)
    assert [trial.state for trial in study.trials] == list(STATES.values())


@pytest.mark.slow
def test_an_optuna_study_of_that_name_stays_as_it_was(url, optuna_url):
    autotune.write_optuna_study("by-hand", optuna_url, storage=url)
    with pytest.raises(StudyMismatch, match="an Optuna study 'by-hand'") as raised:
        autotune.write_optuna_study("by-hand", optuna_url, storage=url)
    assert "optuna delete-study --study-name by-hand" in raised.value.hint
    assert len(optuna.load_study(study_name="by-hand", storage=optuna_url).trials) == len(STATES)


def test_one_study_that_cannot_be_written_keeps_the_others_out(tmp_path, optuna_url):
    url = f"sqlite:///{tmp_path}/two.db"
    for name in ("first", "second"):
        write_study(url, [measured()], name=name)
    optuna.create_study(study_name="second", storage=optuna_url)
    with open_store(url) as store, pytest.raises(StudyMismatch):
        export_to_optuna(store, ["first", "second"], optuna_url)
    assert names_in(optuna_url) == ["second"]


KILLED = """
import os, signal, sys
import optuna, autotune
written = optuna.Study.add_trial
def add_trial(study, trial):
    written(study, trial)
    if len(study.trials) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
optuna.Study.add_trial = add_trial
autotune.write_optuna_study("by-hand", sys.argv[1], storage=sys.argv[2])
"""


@pytest.mark.slow
def test_a_killed_export_leaves_no_part_of_a_study(url, optuna_url):
    command = [sys.executable, "-c", KILLED, optuna_url, url]
    killed = subprocess.run(command, check=False, timeout=120, env=os.environ)
    assert killed.returncode == -signal.SIGKILL
    assert names_in(optuna_url) == []


def test_the_studies_database_itself_can_have_it(tmp_path):
    url = f"sqlite:///{tmp_path}/autotune.db"
    write_study(url, [measured(), None])
    before = autotune.show("by-hand", storage=url)
    autotune.write_optuna_study("by-hand", url, storage=url)
    assert names_in(url) == ["by-hand"]
    assert autotune.show("by-hand", storage=url) == before


# -- what is rejected ------------------------------------------------------------------------------


def test_a_study_that_does_not_exist_creates_no_database(url, tmp_path):
    with pytest.raises(UnknownStudy):
        autotune.write_optuna_study("nope", f"sqlite:///{tmp_path}/optuna.db", storage=url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("optuna_url", "error"),
    [
        ("optuna.db", "'optuna.db' is not a database URL"),
        ("nonesuch://host/optuna", "is not a database URL"),
        ("sqlite://", "a database in memory"),
        ("postgresql+nonesuch://host/optuna", "is not a database URL"),
        ("mysql+aiomysql://user:secret@host/optuna", "driver 'aiomysql' .* is not installed"),
        ("postgresql://user:secret@127.0.0.1:1/optuna", "cannot be reached"),
    ],
)
def test_a_url_that_cannot_be_used_is_one_sentence(url, optuna_url, error):
    with pytest.raises(StorageUnavailable, match=error) as raised:
        autotune.write_optuna_study("by-hand", optuna_url, storage=url)
    assert raised.value.exit_code == 2
    assert "secret" not in raised.value.message + raised.value.hint


def test_a_missing_database_of_a_server_is_named_with_the_command_that_creates_it(url, postgres):
    with pytest.raises(StorageUnavailable, match="does not exist") as raised:
        autotune.write_optuna_study("by-hand", postgres.url("not_there"), storage=url)
    assert "createdb" in raised.value.hint


def test_a_file_that_is_no_database_stays_as_it_was(url, tmp_path):
    file = tmp_path / "optuna.db"
    file.write_text("my notes\n" * 100)
    with pytest.raises(StorageUnavailable, match="not a database") as raised:
        autotune.write_optuna_study("by-hand", f"sqlite:///{file}", storage=url)
    assert "--to-optuna" in raised.value.hint
    assert file.read_text() == "my notes\n" * 100


def test_tables_of_another_optuna_are_named_with_the_way_out(url, tmp_path):
    optuna_url = f"sqlite:///{tmp_path}/optuna.db"
    optuna.create_study(storage=optuna_url)
    engine = sqlalchemy.create_engine(optuna_url)
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("UPDATE alembic_version SET version_num = 'v9.0.0.a'"))
    engine.dispose()
    with pytest.raises(StorageUnavailable, match="another version of Optuna") as raised:
        autotune.write_optuna_study("by-hand", optuna_url, storage=url)
    assert "optuna storage upgrade" in raised.value.hint


# -- the command -----------------------------------------------------------------------------------


def test_the_command_says_what_it_has_written_and_left_out(url, tmp_path):
    ended = run_here(
        *("studies", "export", "by-hand", "--to-optuna", "sqlite:///optuna.db", "--storage", url),
        folder=tmp_path,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == (
        "exported by-hand to sqlite:///optuna.db: 9 trials; left out without a result: 9\n"
    )


# -- optuna-dashboard ------------------------------------------------------------------------------


def get(app, path):
    """Returns what a page of optuna-dashboard gets from `path` of its interface."""
    environment = {"PATH_INFO": path, "REQUEST_METHOD": "GET"}
    setup_testing_defaults(environment)
    statuses = []
    body = app(environment, lambda status, *_: statuses.append(status))
    assert statuses == ["200 OK"]
    return json.loads(b"".join(body))


@pytest.fixture(scope="module")
def dashboard(exported_file):
    """optuna-dashboard on the exported study, as its own server calls it."""
    optuna_dashboard = pytest.importorskip(
        "optuna_dashboard", reason="optuna-dashboard is not installed"
    )
    return optuna_dashboard.wsgi(f"sqlite:///{exported_file}")


def test_optuna_dashboard_lists_the_study(dashboard):
    (study,) = get(dashboard, "/api/studies")["study_summaries"]
    assert study["study_name"] == "by-hand"
    assert study["directions"] == ["minimize", "maximize", "minimize"]


def test_optuna_dashboard_shows_every_trial_with_its_state(dashboard):
    trials = get(dashboard, "/api/studies/1")["trials"]
    assert [trial["state"] for trial in trials] == [
        state.name.capitalize() for state in STATES.values()
    ]


def test_optuna_dashboard_knows_which_trials_are_over_the_cap(dashboard):
    trials = get(dashboard, "/api/studies/1")["trials"]
    over = [outcome in NEEDS_TOO_MUCH for outcome in STATES]
    assert [trial["constraints"][0] > 0 for trial in trials] == over


def test_optuna_dashboard_names_the_objectives(dashboard):
    names = get(dashboard, "/api/studies/1")["objective_names"]
    assert names == ["peak_memory_bytes", "tokens_per_second", "perplexity"]
