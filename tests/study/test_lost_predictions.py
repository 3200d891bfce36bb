"""A prediction whose process is lost each time does not keep its configuration from being tried."""

from concurrent.futures import Future

from autotune.errors import TrialServerLost
from autotune.execution.tasks import Predict
from autotune.study.request import SearchRequest
from autotune.study.search import search
from tests.quick_study.quick_executor import QuickExecutor


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
