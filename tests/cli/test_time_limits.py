"""The limits of a trial's time: on the command line, in Python, and in the command that goes on."""

import pytest

import autotune
from autotune.cli.search_run import continue_command
from autotune.errors import InvalidInput
from autotune.study.request import SearchRequest


def test_the_continue_command_has_the_given_limits():
    request = SearchRequest(
        trial_time_limit=1800.0,
        compile_time_limit=900.0,
        step_time_limit=1.5,
    )
    assert continue_command("mine", request) == (
        "autotune search --name mine --trial-time-limit 30m --compile-time-limit 15m "
        "--step-time-limit 1.5s"
    )


def test_limits_that_follow_from_the_whole_are_not_repeated():
    assert continue_command("mine", SearchRequest()) == "autotune search --name mine"


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"step_time_limit": "soon"}, "'soon' is not a duration"),
        ({"compile_time_limit": "0s"}, "'0s' is not a possible duration"),
        ({"step_time_limit": "11m"}, "longer than the whole trial may take, 600 s"),
        (
            {"compile_time_limit": 61, "trial_time_limit": "1m"},
            "a compile time limit of 61 s is longer",
        ),
    ],
)
def test_an_impossible_limit_is_rejected(limits, expected):
    with pytest.raises(InvalidInput, match=expected):
        autotune.search(**limits)


def test_the_continue_command_says_whether_trials_are_predicted_and_snapshots_recorded():
    request = SearchRequest(predict=False, memory_snapshot=True, device="cuda:0")
    assert (
        continue_command("mine", request)
        == "autotune search --name mine --no-predict --memory-snapshot"
    )
