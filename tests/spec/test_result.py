from typing import get_args

import pytest

from autotune.errors import InvalidInput
from autotune.spec.result import Outcome
from tests.building.results import MIB, record, study_result
from tests.building.views import predicted


@pytest.mark.parametrize("outcome", get_args(Outcome))
def test_an_outcome_is_a_result_a_lack_of_memory_a_failure_or_unfinished(outcome):
    trial = record(0, outcome=outcome)
    kinds = [trial.is_within_cap, trial.was_rejected, trial.failed, not trial.is_finished]
    assert kinds.count(True) == 1


def test_only_a_prediction_is_over_the_cap_without_having_been_begun():
    outcomes = [record(0, outcome=outcome) for outcome in get_args(Outcome)]
    over = [trial for trial in outcomes if trial.is_over_cap and not trial.ran_out_of_memory]
    assert [trial.outcome for trial in over] == ["predicted_over_cap"]


def test_only_a_trial_over_the_cap_was_rejected_after_its_memory_was_measured():
    outcomes = [record(0, outcome=outcome) for outcome in get_args(Outcome)]
    measured = [trial for trial in outcomes if trial.was_rejected and trial.was_trained]
    assert [trial.outcome for trial in measured] == ["over_cap"]


@pytest.mark.parametrize("outcome", get_args(Outcome))
def test_what_failed_or_has_not_finished_was_not_trained(outcome):
    trial = record(0, outcome=outcome)
    assert not (trial.was_trained and (trial.failed or not trial.is_finished))


def test_a_number_of_a_trial_that_is_none_is_rejected_as_such():
    with pytest.raises(InvalidInput, match="a whole number, not '0'"):
        study_result([record(0)]).trial("0")


def test_python_shows_a_prediction_in_one_line():
    shown = repr(predicted(peak=100 * MIB, within=0.1))
    assert shown == (
        "<prediction for cpu: peak of 100.0 MiB (90.00 MiB to 110.0 MiB) in backward, in blocks.0 "
        "at aten.mm>"
    )
