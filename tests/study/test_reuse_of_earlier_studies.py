"""What a new study reuses from earlier ones: studies made by hand, without a device."""

import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from autotune.errors import Stopped, StorageUnreachable
from autotune.spec.confirmation import RepeatedSpeed
from autotune.spec.prediction import Forecast
from autotune.spec.provenance import MEASURED, FailedSeed
from autotune.spec.result import DeviceInfo
from autotune.spec.search_space import SearchSpace
from autotune.spec.workload import make_workload
from autotune.storage.retry import RetryPolicy
from autotune.storage.store import StudyStore
from autotune.study.opening.reuse import EarlierStudy, are_comparable, rate_under_cap, reuse, select
from autotune.study.request import SearchRequest
from tests.building.results import mean_of, out_of_memory, record, shared_with, trial
from tests.building.studies import SPACE, config, definition, measured, open_store, write_study
from tests.building.views import predicted

MIB = 1024**2
GPU = DeviceInfo(
    device="cuda:0", name="a GPU", total_memory_bytes=2**36, versions={"torch": "2.13.0"}
)
BASELINE = config(0)
HALF = replace(config(4), optimizer_fusion="foreach")
"""Half the micro batch, and the fusion of the space."""
WHOLE = {"perplexity_source": MEASURED, "parity": "same"}
NEW = definition("new")
NOTHING_SAID = SearchRequest()


def cuda(name="earlier", **changes):
    return definition(name, device=GPU, **changes)


def study(*records, name="earlier", forecasts=(), **changes):
    known = {forecast.config.fingerprint: forecast for forecast in forecasts}
    return EarlierStudy(definition=definition(name, **changes), records=records, forecasts=known)


def taken(*studies, new=NEW, **options):
    return select(new, studies, SearchRequest(**options)).records


def outcome_at(cap_mib, found, *, measured_at=64, on=definition):
    """Of a record measured under one cap, under another; None where it is to be measured again."""
    earlier = on("earlier", cap_bytes=measured_at * MIB)
    rated = rate_under_cap(found, earlier=earlier, new=on("new", cap_bytes=cap_mib * MIB))
    return rated and rated.outcome


# -- whether it holds under another cap ------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["ok", "over_cap"])
@pytest.mark.parametrize(("cap_mib", "expected"), [(39, "over_cap"), (40, "ok"), (200, "ok")])
def test_what_was_measured_on_a_cpu_is_judged_by_the_new_cap(outcome, cap_mib, expected):
    found = record(1, config=HALF, memory=40 * MIB, outcome=outcome)
    assert outcome_at(cap_mib, found, measured_at=40 if outcome == "ok" else 30) == expected


def test_what_is_now_over_the_cap_says_so_by_the_new_cap():
    found = record(1, config=HALF, memory=40 * MIB)
    rated = rate_under_cap(
        found, earlier=definition("earlier"), new=definition("new", cap_bytes=30 * MIB)
    )
    assert rated.message == "needs 40.00 MiB of 30.00 MiB"


@pytest.mark.parametrize(("cap_mib", "expected"), [(60, "over_cap"), (80, None)])
def test_what_was_stopped_over_the_cap_is_measured_where_it_fits_now(cap_mib, expected):
    found = record(1, config=HALF, memory=70 * MIB, speed=None, perplexity=None, outcome="over_cap")
    assert outcome_at(cap_mib, found) == expected


@pytest.mark.parametrize(("cap_mib", "expected"), [(40, "ok"), (39, None), (29, "over_cap")])
def test_on_a_gpu_an_allocator_may_do_with_less_but_not_with_less_than_is_alive(cap_mib, expected):
    found = record(1, config=HALF, memory=20 * MIB, device_bytes=40 * MIB, context_bytes=10 * MIB)
    assert outcome_at(cap_mib, found, on=cuda) == expected


@pytest.mark.parametrize(("cap_mib", "expected"), [(64, "ok"), (128, None)])
def test_a_trial_whose_allocator_came_to_its_limit_holds_at_that_limit_only(cap_mib, expected):
    found = record(1, config=HALF, memory=60 * MIB, alloc_retries=3)
    assert outcome_at(cap_mib, found, on=cuda) == expected


@pytest.mark.parametrize(("cap_mib", "expected"), [(63, "over_cap"), (64, "over_cap"), (65, None)])
def test_what_an_enforced_cap_could_not_hold_is_over_it_up_to_that_cap(cap_mib, expected):
    found = record(
        1, config=HALF, memory=50 * MIB, device_bytes=70 * MIB, speed=None, outcome="over_cap"
    )
    assert outcome_at(cap_mib, found, on=cuda) == expected


@pytest.mark.parametrize(("cap_mib", "expected"), [(64, "out_of_memory"), (65, None)])
def test_out_of_memory_holds_up_to_the_cap_it_was_met_at(cap_mib, expected):
    assert outcome_at(cap_mib, out_of_memory(1, config=HALF), on=cuda) == expected


@pytest.mark.parametrize("outcome", ["parity_failed", "diverged"])
def test_what_computes_no_training_does_so_under_any_cap(outcome):
    found = record(1, config=HALF, memory=None, speed=None, perplexity=None, outcome=outcome)
    assert [outcome_at(cap_mib, found) for cap_mib in (1, 1000)] == [outcome, outcome]


@pytest.mark.parametrize(
    "outcome", ["dominated", "predicted_over_cap", "crashed", "timeout", "interrupted"]
)
def test_an_incomplete_measurement_is_not_reused(outcome):
    assert outcome_at(64, record(1, config=HALF, outcome=outcome)) is None


# -- the baseline ----------------------------------------------------------------------------------


def test_a_baseline_over_the_cap_is_reused_with_its_speed():
    found = record(0, config=BASELINE, memory=90 * MIB, outcome="over_cap")
    assert outcome_at(50, found) == outcome_at(50, found, on=cuda) == "over_cap"


def test_a_baseline_without_a_speed_is_measured_beyond_the_cap():
    found = record(
        0, config=BASELINE, memory=90 * MIB, speed=None, perplexity=None, outcome="over_cap"
    )
    assert (outcome_at(50, found), outcome_at(50, replace(found, config=HALF))) == (
        None,
        "over_cap",
    )


def test_what_ran_out_of_memory_under_a_cap_is_given_all_of_the_device_as_a_baseline():
    space = replace(SPACE, defaults={"optimizer": "sgd"})
    found = out_of_memory(1, config=BASELINE)
    assert rate_under_cap(found, earlier=definition("earlier"), new=NEW) == found
    assert rate_under_cap(found, earlier=definition("earlier", space=space), new=NEW) is None


# -- from which study ------------------------------------------------------------------------------


def other_device(**changes):
    return {"device": replace(NEW.device, **changes)}


@pytest.mark.parametrize(
    "changes",
    [
        {"workload": make_workload("cpu", {"steps": 24, "text_sha256": "e" * 64})},
        {"workload": make_workload("cpu", {"steps": 25, "text_sha256": "f" * 64})},
        other_device(name="another CPU"),
        other_device(versions={**NEW.device.versions, "torch": "2.14.0"}),
        other_device(versions={**NEW.device.versions, "autotune": "0.2.0"}),
        other_device(others="3 GiB of its memory are in use"),
        {"device": GPU},
    ],
    ids=["text", "steps", "device", "torch", "autotune", "busy", "kind of device"],
)
def test_a_study_that_would_not_measure_the_same_is_none_to_take_from(changes):
    assert not are_comparable(definition("earlier", **changes), NEW)


def test_another_space_cap_or_sampler_does_not_change_what_a_trial_measures():
    space = SearchSpace(name="another", techniques={"precision": ("fp32",)})
    assert are_comparable(definition("earlier", space=space, cap_bytes=MIB, sampler="random"), NEW)


def test_what_was_found_particular_about_a_device_makes_it_no_other_one():
    found = replace(
        GPU, context_bytes=480 * MIB, compute_mode="default", notes=("NVML names no processes",)
    )
    today = definition("new", device=found)
    assert are_comparable(cuda(), today)
    assert today.identity() == cuda("new").identity()


def test_of_two_gpus_of_one_name_the_smaller_is_another():
    smaller = replace(GPU, total_memory_bytes=2**35)
    assert (
        are_comparable(cuda(), cuda()),
        are_comparable(cuda(), definition("new", device=smaller)),
    ) == (True, False)


def test_nothing_is_reused_of_a_script_whose_files_nobody_knows(tmp_path):
    (tmp_path / "train.py").touch()
    settings = {"steps": 24, "script": str(tmp_path / "train.py"), "model_sha256": "a" * 64}
    script = make_workload("cpu", settings)
    assert not are_comparable(
        definition("earlier", workload=script), definition("new", workload=script)
    )


def test_trials_that_share_a_gpu_reuse_nothing_that_was_measured_alone():
    alone = EarlierStudy(
        definition=cuda(), records=(record(0, config=BASELINE, **WHOLE),), forecasts={}
    )
    reused = [
        len(select(cuda("new"), [alone], SearchRequest(trials_per_device=trials)).records)
        for trials in (1, 2)
    ]
    assert reused == [1, 0]


def test_the_newest_study_that_has_a_result_gives_it():
    newest = study(record(0, config=BASELINE, **WHOLE), name="newest")
    older = study(
        record(3, config=BASELINE, **WHOLE), record(4, config=HALF, **WHOLE), name="older"
    )
    found = select(NEW, [newest, older], NOTHING_SAID)
    origins = [trial(0, "newest"), trial(4, "older")]
    assert ([one.reused_from for one in found.records], found.counts) == (
        origins,
        {"newest": 1, "older": 1},
    )


def test_a_result_is_taken_from_the_study_that_measured_it():
    copied = record(0, config=HALF, reused_from=trial(4, "older"), **WHOLE)
    older = study(record(4, config=HALF, **WHOLE), name="older")
    assert [one.reused_from for one in taken(study(copied), older)] == [trial(4, "older")]


@pytest.mark.parametrize(("spread", "count"), [(0.19, 1), (0.21, 0)])
def test_a_speed_that_varied_from_step_to_step_is_measured_again(spread, count):
    noisy = record(3, config=HALF, speed=1000.0, tokens_per_second_spread=1000.0 * spread, **WHOLE)
    assert len(taken(study(noisy))) == count


@pytest.mark.parametrize(("again", "count"), [(1100.0, 1), (260.0, 0), (2500.0, 0)])
def test_a_speed_that_was_another_when_measured_again_is_not_reused(again, count):
    repeats = [
        RepeatedSpeed(config=HALF, tokens_per_second=again, failure="", seconds=1.0)
        for _ in range(5)
    ]
    earlier = replace(
        study(record(3, config=HALF, speed=1000.0, **WHOLE)), confirmations=tuple(repeats)
    )
    assert len(taken(earlier)) == count


@pytest.mark.parametrize(("again", "count"), [(1050.0, 2), (250.0, 0)])
def test_where_the_baseline_was_far_slower_again_no_speed_is_reused(again, count):
    speeds = {BASELINE: 1000.0, HALF: 1200.0}
    records = [
        record(number, config=config, speed=speed, **WHOLE)
        for number, (config, speed) in enumerate(speeds.items())
    ]
    repeats = tuple(
        RepeatedSpeed(config=BASELINE, tokens_per_second=speed, failure="", seconds=1.0)
        for speed in (again, 1000.0, again)
    )
    assert len(taken(replace(study(*records), confirmations=repeats))) == count


def test_what_the_new_space_cannot_try_is_not_reused():
    illegal = replace(HALF, optimizer="sgd")
    new = definition(
        "new", space=SearchSpace(name="named", techniques={}, configurations=({"name": "only"},))
    )
    assert not taken(study(record(1, config=illegal, **WHOLE)))
    assert [
        one.name
        for one in taken(study(record(1, config=HALF), record(2, config=BASELINE)), new=new)
    ] == ["only"]


def test_the_baseline_and_named_configurations_come_first_under_their_names_here():
    named = NEW.legal_space().named["checkpoint every block"]
    records = [record(n, config=one, name="there") for n, one in enumerate((HALF, named, BASELINE))]
    found = taken(study(*records))
    assert [(one.number, one.name) for one in found] == [
        (0, "baseline"),
        (1, "checkpoint every block"),
        (2, None),
    ]


def test_a_reused_result_took_no_time():
    (found,) = taken(
        study(record(0, config=BASELINE, seconds=9.0, seconds_by_part={"training": 8.0}))
    )
    assert (found.seconds, found.seconds_by_part) == (None, None)


# -- perplexities of other trials ------------------------------------------------------------------


def that_shares(number):
    return record(5, config=BASELINE, perplexity_source=shared_with(number))


def test_a_perplexity_shared_with_a_trial_that_came_along_names_its_number_here():
    trained = record(7, config=HALF, **WHOLE)
    assert [one.perplexity_source for one in taken(study(trained, that_shares(7)))] == [
        shared_with(1),
        MEASURED,
    ]


def test_a_perplexity_shared_with_a_trial_that_stays_behind_names_its_study():
    trained = record(7, config=replace(HALF, optimizer="sgd"), **WHOLE)
    (found,) = taken(study(trained, that_shares(7)))
    assert found.perplexity_source == shared_with(7, "earlier")


def test_a_perplexity_shared_with_a_reused_trial_names_the_study_that_trained_it():
    copied = record(7, config=HALF, reused_from=trial(2, "first"), **WHOLE)
    first = study(record(2, config=HALF, **WHOLE), name="first")
    both = study(copied, that_shares(7))
    assert taken(both)[0].perplexity_source == shared_with(2, "first")
    assert taken(both, first)[0].perplexity_source == shared_with(1)


def test_full_trainings_take_over_no_shared_perplexity():
    trained = record(7, config=HALF, **WHOLE)
    assert [one.config for one in taken(study(trained, that_shares(7)), full_trainings=True)] == [
        HALF
    ]


@pytest.mark.parametrize(("seeds", "count"), [(1, 0), (3, 2), (4, 0)])
def test_a_perplexity_of_other_seeds_than_requested_is_measured_again(seeds, count):
    """Beside one of this search it would look like another training."""
    trained = record(7, config=HALF, perplexity_source=mean_of(3), parity="same")
    assert len(taken(study(trained, that_shares(7)), perplexity_seeds=seeds)) == count


def test_a_mean_over_seeds_stays_one():
    source = mean_of(3, FailedSeed(seed=2, reason="crashed"))
    (found,) = taken(
        study(record(0, config=BASELINE, perplexity_source=source, perplexity_spread=0.5)),
        perplexity_seeds=3,
    )
    assert (found.perplexity_source, found.perplexity_spread) == (source, 0.5)


# -- with a database -------------------------------------------------------------------------------


@pytest.fixture
def url(tmp_path):
    """A database with a study of one trial and one prediction."""
    url = f"sqlite:///{tmp_path}/autotune.db"
    write_study(url, [measured(**WHOLE)], name="earlier")
    with open_store(url) as store:
        store.store_forecast("earlier", Forecast(config=BASELINE, prediction=predicted()))
    return url


def test_a_study_is_stored_with_everything_it_reuses(url):
    with open_store(url) as store:
        found = reuse(store, NEW, NOTHING_SAID)
        store.create_study(NEW, trials_wanted=5, records=found.records, forecasts=found.forecasts)
        (stored,) = store.trials("new")
    assert (stored.config, stored.reused_from, stored.feasible) == (
        BASELINE,
        trial(0, "earlier"),
        True,
    )
    assert (stored.predicted_peak_memory_bytes, stored.is_finished) == (100 * MIB, True)


@pytest.mark.parametrize(
    ("options", "records", "forecasts"),
    [
        ({}, 1, 1),
        ({"fresh": True}, 0, 0),
        ({"predict": False}, 1, 0),
        ({"memory_snapshot": True}, 0, 1),
    ],
    ids=["no options", "fresh", "no predictions", "an allocation history of each"],
)
def test_the_request_decides_what_is_reused(options, records, forecasts, url):
    with open_store(url) as store:
        found = reuse(store, NEW, SearchRequest(**options))
    assert (len(found.records), len(found.forecasts)) == (records, forecasts)


def test_a_study_that_cannot_be_read_is_passed_over(url):
    write_study(url, [measured()], name="damaged")
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database, database:
        database.execute("UPDATE autotune_studies SET schema_version = 99 WHERE name = 'damaged'")
    with open_store(url) as store:
        assert reuse(store, NEW, NOTHING_SAID).counts == {"earlier": 1}


def test_a_database_that_goes_away_meanwhile_is_waited_for_and_not_passed_over(
    tmp_path, monkeypatch
):
    url = f"sqlite:///{tmp_path}/autotune.db"
    write_study(url, [measured()])

    def away(*_):
        raise StorageUnreachable("the studies database is away")

    with open_store(url) as store:
        monkeypatch.setattr(store, "definition", away)
        with pytest.raises(StorageUnreachable):
            reuse(store, NEW, NOTHING_SAID)


def test_a_stop_while_the_database_is_away_ends_the_search_for_results(tmp_path):
    url = f"sqlite:///{tmp_path}/autotune.db"
    write_study(url, [measured()], name="earlier")

    def stop():
        raise Stopped("the search was stopped")

    with closing(StudyStore(url, retry=RetryPolicy(limit_seconds=60.0, check_stop=stop))) as store:
        names = store.names()
        store.names = lambda: names  # the database goes away after this answer

        @event.listens_for(store._database.engine, "before_cursor_execute")
        def fail(*_):
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise OperationalError("", {}, error)

        with pytest.raises(Stopped):
            reuse(store, NEW, NOTHING_SAID)
