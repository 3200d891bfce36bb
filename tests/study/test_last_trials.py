"""What a worker does when others begin the last trials wanted while it chooses one."""

from contextlib import ExitStack

import pytest

from autotune.execution.local import LocalExecutor
from autotune.execution.trial_options import TrialOptions
from autotune.study.prediction.prediction_cache import PredictionCache
from autotune.study.running.loop import StudySession
from autotune.study.running.running_study import RunningStudy
from autotune.study.workers.coordinator import Coordinator
from tests.building.studies import config, definition, keep, measured, open_store

WANTED = 5


@pytest.fixture
def session(tmp_path):
    """A worker for whom another one leaves no trial as soon as it begins to choose."""
    looks = []
    with ExitStack() as stack:
        store = stack.enter_context(open_store(f"sqlite:///{tmp_path}/autotune.db"))
        settled = definition(sampler="random")
        store.create_study(settled, trials_wanted=WANTED)
        for known in (settled.baseline_config(), *settled.legal_space().named.values()):
            keep(store, known, measured())

        def others_take_the_last() -> bool:
            looks.append(len(looks))
            if len(looks) == 2:
                for number in range(1, WANTED - 1):
                    keep(store, config(number), measured())
            return False

        shared = Coordinator(settled, store=store, folder=tmp_path, listener=lambda event: None)
        yield (
            StudySession(
                RunningStudy(
                    definition=settled,
                    shared=stack.enter_context(shared),
                    prediction_cache=PredictionCache(settled, store=store, predict=None),
                    folder=tmp_path,
                    listener=lambda event: None,
                    trial_options=TrialOptions(trial_time_limit_seconds=60.0),
                ),
                executor=stack.enter_context(LocalExecutor(tmp_path)),
                should_stop=others_take_the_last,
            ),
            shared,
            looks,
        )


def test_a_worker_whom_others_leave_no_trial_ends_without_trying_the_whole_space(session):
    session, shared, looks = session
    session.run(trials_wanted=WANTED, deadline=None)
    assert len(shared.records) == WANTED
    assert len(looks) < 10  # it looks whether it is to stop before each configuration that it tries
