"""What may be confirmed, and how much time there is for it."""

import math
import time

import pytest

from autotune.spec.confirmation import (
    InitialPerplexity,
    PairedSpeed,
    RepeatedSpeed,
    VariantMeasurement,
)
from autotune.study.confirmation.request import (
    ConfirmRequest,
    allowed_seconds,
    seconds_of_trials,
)
from autotune.study.request import VARIANTS_SHARE
from tests.building.commands import run_here
from tests.building.studies import config, keep, measured, open_store, write_study

CRASHED = {"outcome": "crashed", "message": "it ended", "perplexity": None}


def requested(**options):
    return ConfirmRequest(study="study", storage="sqlite:///a.db", **options).confirmation


# -- time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({}, None),
        ({"time_budget": "5m"}, 300.0),
        ({"time_budget": "none"}, math.inf),
        ({"trial": 3}, math.inf),
        ({"trial": 3, "time_budget": "5m"}, 300.0),
    ],
    ids=["the share", "a budget", "no limit", "one trial", "one trial and a budget"],
)
def test_a_confirmation_takes_the_time_that_was_asked_for(options, seconds):
    assert requested(**options).seconds == seconds


def paired(seconds, *, of=1):
    return PairedSpeed(
        config=config(of),
        partner=config(0),
        schedule="in turn",
        rounds=8,
        speed_ratio=1.0,
        partner_tokens_per_second=1000.0,
        seconds=seconds,
    )


def test_the_share_of_the_finalists_and_that_of_the_variants_are_of_the_whole_search():
    for_finalists, for_variants = allowed_seconds(650.0, [], share=0.2)
    whole = 650.0 + for_finalists + for_variants
    assert for_finalists == pytest.approx(0.2 * whole)
    assert for_variants == pytest.approx(VARIANTS_SHARE * whole)


def test_what_was_spent_before_counts_for_what_it_was_spent_on():
    variant = VariantMeasurement(config=config(5), measurement=measured(), seconds=30.0)
    of_baseline = RepeatedSpeed(config=config(0), tokens_per_second=1000.0, seconds=40.0)
    before = allowed_seconds(650.0, [], share=0.2)
    after = allowed_seconds(
        650.0, [paired(50.0), variant, paired(7.0, of=5), of_baseline], share=0.2
    )
    assert before[0] - after[0] == pytest.approx(50.0)
    assert before[1] - after[1] == pytest.approx(37.0)


def test_the_perplexity_before_training_is_no_part_of_the_confirmation():
    before_training = InitialPerplexity(config=config(5), perplexity=20.0, seconds=90.0)
    variant = VariantMeasurement(config=config(5), measurement=measured(), seconds=30.0)
    expected = allowed_seconds(650.0, [variant], share=0.2)
    assert allowed_seconds(650.0, [variant, before_training], share=0.2) == expected


def test_no_time_is_left_where_more_was_spent():
    assert allowed_seconds(1.0, [paired(50.0)], share=0.2)[0] == 0.0


# -- for how long trials ran -----------------------------------------------------------------------


def test_a_time_in_which_several_trials_ran_counts_once():
    assert seconds_of_trials([(100.0, 60.0), (110.0, 20.0), (150.0, 30.0)]) == 80.0


def test_a_time_in_which_none_ran_does_not_count():
    assert seconds_of_trials([(86_400.0, 30.0), (100.0, 60.0)]) == 90.0


def test_no_trials_took_no_time():
    assert seconds_of_trials([]) == 0.0


@pytest.mark.parametrize("seconds", [0.3, 0.7, 1.3, 4.9])
def test_trials_one_after_the_other_count_in_full_though_dates_are_whole_seconds(seconds):
    times = [(float(int(number * seconds)), seconds) for number in range(50)]
    assert seconds_of_trials(times) == pytest.approx(50 * seconds)


def test_the_database_knows_when_measured_trials_began(tmp_path):
    url = f"sqlite:///{tmp_path}/studies.db"
    began = time.time()
    write_study(url, [measured(), measured()])
    with open_store(url) as store:
        times = store.trial_times("by-hand")
        seconds = [record.seconds for record in store.trials("by-hand")]
    assert [one for _, one in times] == seconds
    assert all(began - 1.0 <= moment <= time.time() for moment, _ in times)


def test_trials_that_ran_at_once_count_once_whoever_confirms_them(tmp_path):
    url = f"sqlite:///{tmp_path}/studies.db"
    write_study(url, [])
    with open_store(url) as store:
        for number in range(4):
            keep(store, config(number), measured(), seconds=100.0)
        assert seconds_of_trials(store.trial_times("by-hand")) == pytest.approx(100.0, abs=5.0)


# -- mistakes --------------------------------------------------------------------------------------


@pytest.fixture
def confirm(tmp_path):
    """confirm([measurement, ...], "--trial", "1") returns how the command ended."""

    def run(measurements, *options):
        url = f"sqlite:///{tmp_path}/studies.db"
        write_study(url, measurements)
        ended = run_here("confirm", "by-hand", "--storage", url, *options, folder=tmp_path)
        with open_store(url) as store:
            assert store.confirmations("by-hand") == []
        return ended

    return run


def test_a_trial_that_crashed_has_no_speed_to_confirm(confirm):
    ended = confirm([measured(), measured(**CRASHED)], "--trial", "1")
    assert ended.returncode == 2
    assert ended.stderr.startswith(
        "error: trial 1 of study 'by-hand' has no speed to confirm: crashed\nhint: "
    )


def test_a_study_without_a_feasible_trial_has_nothing_to_confirm(confirm):
    ended = confirm([measured(**CRASHED)])
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: study 'by-hand' has no feasible trial to confirm\nhint:")
