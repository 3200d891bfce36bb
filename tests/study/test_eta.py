"""The time left, from when trials ended."""

import pytest

from autotune.study.running.eta import eta_seconds


def test_there_is_no_estimate_before_a_trial_has_ended():
    assert eta_seconds([5.0], now=9.0, trials_left=3) is None


def test_an_even_pace_goes_on():
    assert eta_seconds([0.0, 10.0, 20.0, 30.0, 40.0], now=40.0, trials_left=3) == pytest.approx(
        30.0
    )


def test_slow_first_trials_do_not_count_in_the_end():
    assert eta_seconds(
        [0.0, 100.0, 200.0, 210.0, 220.0], now=220.0, trials_left=2
    ) == pytest.approx(20.0)


def test_the_time_of_the_running_trial_is_subtracted():
    assert eta_seconds([0.0, 10.0, 20.0], now=24.0, trials_left=2) == pytest.approx(16.0)


def test_no_time_is_left_after_the_last_trial():
    assert eta_seconds([0.0, 10.0], now=12.0, trials_left=0) == 0.0
