"""Predictions that are lost or impossible do not keep configurations from being tried."""

from concurrent.futures import Future

import pytest

from autotune.errors import TrialServerLost
from autotune.execution.tasks import Predict
from autotune.study.events import Predicting
from autotune.study.request import SearchRequest
from autotune.study.search import search
from tests.quick_study.quick_executor import QuickExecutor
from tests.quick_study.worker import SPACE


class LosesPredictions(QuickExecutor):
    """As where a user's model ends the process that predicts it."""

    def call(self, task, **options):
        if not isinstance(task, Predict):
            return super().call(task, **options)
        future = Future()
        future.set_exception(TrialServerLost("the process that starts the trials was killed"))
        return future


def test_what_cannot_be_predicted_is_trained(tmp_path, one_trial_server):
    request = SearchRequest(
        storage=f"sqlite:///{tmp_path}/autotune.db", name="lost", max_mem=2**30, trials=2
    )
    result = search(request, make_executor=LosesPredictions)
    assert [record.outcome for record in result.trials] == ["ok", "ok"]


@pytest.mark.slow
def test_a_search_whose_predictions_are_all_impossible_trains_instead_of_predicting(tmp_path):
    """Of a large space, under a cap that most of it does not fit."""
    events = []
    request = SearchRequest(
        storage=f"sqlite:///{tmp_path}/autotune.db",
        name="impossible",
        space=str(SPACE),
        max_mem=80 * 2**20,
        device="cpu",
        trials=5,
        confirm=False,
    )
    result = search(request, listener=events.append, make_executor=QuickExecutor)
    assert len(result.trials) == 5
    assert sum(isinstance(event, Predicting) for event in events) <= 20
