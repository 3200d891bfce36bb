from typing import get_args

import pytest

from autotune.spec.result import Outcome
from tests.building.results import record


@pytest.mark.parametrize("outcome", get_args(Outcome))
def test_an_outcome_is_a_result_a_lack_of_memory_a_failure_or_unfinished(outcome):
    trial = record(0, outcome=outcome)
    lacks_memory = trial.is_over_cap or trial.ran_out_of_memory
    is_result = outcome in ("ok", "dominated")
    assert [is_result, lacks_memory, trial.failed, not trial.is_finished].count(True) == 1


def test_only_a_prediction_is_over_the_cap_without_having_been_begun():
    outcomes = [record(0, outcome=outcome) for outcome in get_args(Outcome)]
    over = [trial for trial in outcomes if trial.is_over_cap and not trial.ran_out_of_memory]
    assert [trial.outcome for trial in over] == ["predicted_over_cap"]
