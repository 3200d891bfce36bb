"""A time budget holds from the command to its end."""

import math
import time

import pytest

from autotune.study.request import SearchRequest
from autotune.study.running.time_budget import TimeBudget


def budget(seconds, *, set_up_for=0.0, seconds_waited=0.0, **options):
    request = SearchRequest(time_budget=seconds, **options)
    return TimeBudget.of(
        request, began=time.monotonic() - set_up_for, seconds_waited=seconds_waited
    )


def test_trials_and_confirmation_share_out_what_set_up_leaves():
    made = budget(600.0, set_up_for=300.0)
    assert made.seconds_for_trials == pytest.approx(0.65 * 300.0, abs=1.0)
    assert made.ends - time.monotonic() == pytest.approx(300.0, abs=1.0)


def test_waiting_for_a_device_that_another_process_uses_does_not_count():
    made = budget(600.0, set_up_for=130.0, seconds_waited=100.0)
    assert made.seconds_for_trials == pytest.approx(0.65 * 570.0, abs=1.0)


def test_set_up_that_takes_a_tenth_of_it_is_said():
    assert budget(600.0, set_up_for=30.0).setup_note == ""
    note = budget(60.0, set_up_for=12.0).setup_note
    assert note.startswith("set-up took 12.0 s of the time budget of 1 m 00 s")


def test_after_a_long_set_up_no_seconds_are_left_and_none_are_owed():
    assert budget(60.0, set_up_for=100.0).seconds_for_trials == 0.0


def test_without_a_budget_nothing_ends():
    made = TimeBudget.of(SearchRequest(), began=0.0, seconds_waited=0.0)
    assert (made.trials_until, made.ends, made.seconds_for_trials) == (math.inf, math.inf, None)
