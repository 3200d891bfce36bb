"""Speeds from several measurements: their estimate, their interval and their noise."""

import math
import random
from statistics import NormalDist

import pytest

from autotune.analysis.confirmed_speed import (
    PRIOR_NOISE_ALONE,
    PRIOR_SHARE_IN_TURN,
    confirmed_speeds,
    speed_noise,
    student_t,
    with_confirmed_speeds,
)
from autotune.spec.config import TrainingConfig
from autotune.spec.confirmation import PairedSpeed, RepeatedSpeed
from autotune.spec.provenance import TrialReference
from tests.building.results import record

BASELINE, SUBJECT, OTHER = (TrainingConfig(micro_batch_size=size) for size in (8, 4, 2))


def paired(ratio, *, level=1000.0, config=SUBJECT, partner=BASELINE):
    return PairedSpeed(
        config=config,
        partner=partner,
        schedule="in turn",
        rounds=24,
        speed_ratio=ratio,
        partner_tokens_per_second=level,
        seconds=1.0,
    )


def failed(*, config=SUBJECT):
    return PairedSpeed(
        config=config,
        partner=BASELINE,
        schedule="in turn",
        rounds=0,
        speed_ratio=None,
        partner_tokens_per_second=None,
        failure="out_of_memory",
        seconds=1.0,
    )


def repeated(speed, *, config=BASELINE):
    return RepeatedSpeed(config=config, tokens_per_second=speed, seconds=1.0)


def trials(*, baseline=1000.0, subject=1500.0, **changes):
    return [
        record(0, config=BASELINE, speed=baseline),
        record(1, config=SUBJECT, speed=subject, **changes),
    ]


def relative_width(interval):
    return math.log(interval[1] / interval[0])


# -- the estimate ----------------------------------------------------------------------------------


def test_a_confirmed_speed_is_the_ratio_times_the_speed_of_the_partner():
    found = confirmed_speeds(trials(), [paired(1.2)] * 3)
    assert found[SUBJECT].tokens_per_second == pytest.approx(1200.0)
    assert found[SUBJECT].confirmations == 3


def test_the_lucky_speed_of_the_trial_itself_does_not_count_any_more():
    [_, confirmed] = with_confirmed_speeds(trials(subject=3000.0), [paired(1.2)])
    assert confirmed.tokens_per_second == pytest.approx(1200.0)


def test_ratios_and_levels_are_averaged_as_logarithms():
    found = confirmed_speeds(trials(), [paired(1.0, level=1000.0), paired(1.21, level=1000.0)])
    assert found[SUBJECT].tokens_per_second == pytest.approx(1100.0)


def test_the_speed_of_the_partner_is_the_mean_of_its_trial_its_repeats_and_its_runs():
    found = confirmed_speeds(trials(baseline=800.0), [paired(1.0, level=1000.0), repeated(1250.0)])
    assert found[BASELINE].tokens_per_second == pytest.approx(1000.0)
    assert found[SUBJECT].tokens_per_second == pytest.approx(1000.0)


def test_a_partner_that_is_much_slower_in_turn_keeps_its_speed_alone():
    runs = [paired(1.2, level=level) for level in (250.0, 255.0, 245.0)]
    found = confirmed_speeds(trials(), [*runs, repeated(1000.0)])
    assert found[BASELINE].tokens_per_second == pytest.approx(1000.0)
    assert found[SUBJECT].tokens_per_second == pytest.approx(1200.0)
    assert relative_width(found[SUBJECT].interval) < 0.5


def test_three_configurations_of_one_run_measure_the_speed_of_their_partner_once():
    run = [paired(1.1, level=1000.0 / 0.9, config=config) for config in (SUBJECT, OTHER)]
    found = confirmed_speeds(trials(baseline=900.0), run)
    assert found[BASELINE].tokens_per_second == pytest.approx(1000.0)
    assert found[BASELINE].confirmations == 1


def test_two_runs_in_which_the_partner_has_the_same_speed_are_two():
    found = confirmed_speeds(trials(), [paired(1.1), paired(1.1)])
    assert found[BASELINE].confirmations == 2


def test_a_trial_of_an_earlier_study_says_nothing_of_the_speed_of_the_device_today():
    today = [
        record(0, config=BASELINE, speed=500.0, reused_from=TrialReference(number=3, study="a"))
    ]
    found = confirmed_speeds(today, [paired(1.2)])
    assert found[SUBJECT].tokens_per_second == pytest.approx(1200.0)


def test_what_failed_in_turn_has_the_speed_of_its_trial():
    [_, subject] = with_confirmed_speeds(trials(), [failed()])
    assert (subject.tokens_per_second, subject.confirmations) == (1500.0, 0)


def test_a_trial_that_was_repeated_alone_has_an_interval_and_no_measurement_in_turn():
    [baseline, _] = with_confirmed_speeds(trials(baseline=900.0), [repeated(1600.0)])
    assert baseline.tokens_per_second == pytest.approx(1200.0)
    assert baseline.tokens_per_second_interval is not None
    assert baseline.confirmations == 0


def test_without_measurements_after_the_trials_nothing_changes():
    assert with_confirmed_speeds(trials(), []) == trials()


def test_a_trial_without_a_speed_stays_without_one():
    [_, subject] = with_confirmed_speeds(trials(subject=None), [paired(1.2)])
    assert subject.tokens_per_second is None


def test_what_was_measured_once_has_the_noise_of_a_single_measurement():
    records = [*trials(), record(2, config=OTHER)]
    confirmations = [paired(1.2), paired(1.3, level=1100.0)]
    once = with_confirmed_speeds(records, confirmations)[2]
    assert once.speed_error == speed_noise(records, confirmations).alone


# -- the noise -------------------------------------------------------------------------------------


def test_without_repeats_the_noise_is_the_prior():
    noise = speed_noise(trials(), [])
    assert noise.alone == pytest.approx(PRIOR_NOISE_ALONE)
    assert noise.in_turn == pytest.approx(PRIOR_SHARE_IN_TURN * PRIOR_NOISE_ALONE)
    assert not noise.was_measured


def test_many_repeats_of_the_baseline_tell_the_noise_whatever_the_prior_says():
    draw = random.Random(2)
    repeats = [repeated(1000.0 * math.exp(draw.gauss(0.0, 0.2))) for _ in range(300)]
    assert speed_noise(trials(), repeats).alone == pytest.approx(0.2, rel=0.1)


def test_many_runs_tell_the_noise_in_turn_whatever_the_device_does_meanwhile():
    draw = random.Random(3)
    runs = [
        paired(math.exp(draw.gauss(0.2, 0.03)), level=1000.0 * math.exp(draw.gauss(0.0, 0.3)))
        for _ in range(300)
    ]
    assert speed_noise(trials(), runs).in_turn == pytest.approx(0.03, rel=0.15)


def test_different_configurations_are_no_noise():
    run = [paired(1.0, config=SUBJECT), paired(2.0, config=OTHER)]
    noise = speed_noise(trials(), run)
    assert noise.in_turn == pytest.approx(PRIOR_SHARE_IN_TURN * noise.alone)


# -- the interval ----------------------------------------------------------------------------------


def test_more_measurements_make_the_interval_narrower():
    widths = [
        relative_width(confirmed_speeds(trials(), [paired(1.2)] * times)[SUBJECT].interval)
        for times in (1, 3, 10)
    ]
    assert widths == sorted(widths, reverse=True)
    assert widths[2] < 0.6 * widths[0]


def test_a_speed_is_in_the_middle_of_its_interval_by_ratio():
    found = confirmed_speeds(trials(), [paired(1.2)] * 2)[SUBJECT]
    low, high = found.interval
    assert math.sqrt(low * high) == pytest.approx(found.tokens_per_second)


@pytest.mark.parametrize("in_turn", [0.03, 0.04, 0.05])
def test_intervals_hold_the_true_speed_in_about_95_percent_of_studies(in_turn):
    draw = random.Random(4)
    noise = NormalDist()
    studies, covered = 500, 0
    for _ in range(studies):

        def error(deviation):
            return math.exp(deviation * noise.inv_cdf(draw.uniform(1e-9, 1 - 1e-9)))

        records = trials(baseline=1000.0 * error(0.094), subject=1200.0 * error(0.094))
        measured = [repeated(1000.0 * error(0.094)) for _ in range(3)]
        measured += [paired(1.2 * error(in_turn), level=1000.0 * error(0.094)) for _ in range(3)]
        low, high = confirmed_speeds(records, measured)[SUBJECT].interval
        covered += low <= 1200.0 <= high
    assert 0.90 <= covered / studies <= 0.98


@pytest.mark.parametrize(
    ("degrees_of_freedom", "table"), [(3, 3.182), (4, 2.776), (6, 2.447), (10, 2.228), (30, 2.042)]
)
def test_the_quantile_of_students_t_is_that_of_the_tables(degrees_of_freedom, table):
    assert student_t(degrees_of_freedom) == pytest.approx(table, rel=0.01)
