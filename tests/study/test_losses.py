"""A trial whose process is killed from outside is retried, and its configuration has not failed."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from autotune.execution.local import LocalExecutor
from autotune.spec.attempt import MAX_RETRIES, new_attempt_id
from autotune.spec.study import DEFAULT_STORAGE
from autotune.storage.store import StudyStore
from autotune.study.events import AttemptLost, TrialBegan, TrialEnded
from autotune.study.request import SearchRequest
from autotune.study.search import search
from tests.building.trial_servers import STAND_IN, STAND_IN_COMMAND


class Killer:
    """Kills the process of a trial the first `times` that it runs; a listener of all events."""

    def __init__(self, number: int, *, times: int) -> None:
        self.number, self.left = number, times
        self.events = []
        self.executor: LocalExecutor | None = None

    def make_executor(self, *arguments, **options):
        self.executor = LocalExecutor(*arguments, **options, server_command=STAND_IN_COMMAND)
        return self.executor

    def __call__(self, event):
        self.events.append(event)
        if isinstance(event, TrialBegan) and event.number == self.number and self.left:
            self.left -= 1
            threading.Thread(
                target=self._kill, args=(self.executor.server_pid,), daemon=True
            ).start()

    def _kill(self, server_pid: int) -> None:
        children = Path(f"/proc/{server_pid}/task/{server_pid}/children")
        while not (found := children.read_text().split()):
            time.sleep(0.002)
        os.kill(int(found[0]), signal.SIGKILL)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


class ServerKiller(Killer):
    """Kills the trial server instead, as a trial can do that is a process of the same user."""

    def _kill(self, server_pid: int) -> None:
        children = Path(f"/proc/{server_pid}/task/{server_pid}/children")
        while not children.read_text().split():
            time.sleep(0.002)
        os.kill(server_pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, one_trial_server):
    before, folder = os.getcwd(), tmp_path_factory.mktemp("losses")
    os.chdir(folder)
    os.environ["STAND_IN_SECONDS"] = "0.3"
    yield folder
    del os.environ["STAND_IN_SECONDS"]
    os.chdir(before)


def run(killer, *, name, trials=3, **options):
    request = SearchRequest(
        name=name,
        space=str(STAND_IN.with_name("space.toml")),
        device="cpu",
        sampler="random",
        trials=trials,
        predict=False,
        fresh=True,
        confirm=False,
        **options,
    )
    return search(request, listener=killer, make_executor=killer.make_executor)


@pytest.fixture(scope="module")
def once(folder):
    """A study whose trial 1 was killed once, and the events."""
    killer = Killer(1, times=1)
    return run(killer, name="once"), killer


@pytest.fixture(scope="module")
def always(folder):
    """A study whose trial 1 was killed as often as it was tried, and the events."""
    killer = Killer(1, times=MAX_RETRIES + 1)
    return run(killer, name="always"), killer


def test_a_trial_that_was_killed_from_outside_is_tried_again(once):
    result, killer = once
    assert [event.number for event in killer.of(TrialBegan)] == [0, 1, 1, 2]
    assert result.trial(1).is_finished


def test_a_failed_attempt_is_reported_with_its_cause(once):
    _, killer = once
    [lost] = killer.of(AttemptLost)
    assert (lost.number, lost.attempts_left, "SIGKILL" in lost.cause) == (1, MAX_RETRIES, True)


def test_a_trial_is_not_tried_for_ever(always):
    result, killer = always
    assert [event.number for event in killer.of(TrialBegan)].count(1) == MAX_RETRIES + 1
    assert (result.trial(1).outcome, result.trial(1).is_finished) == ("interrupted", False)
    assert result.trial(1).message.startswith(f"lost {MAX_RETRIES + 1} times, not by its own fault")


def test_the_search_goes_on_with_the_other_trials(always):
    result, killer = always
    assert [trial.is_finished for trial in result.trials] == [True, False, True]
    assert len(killer.of(TrialEnded)) == 2


@pytest.mark.slow
def test_a_trial_that_ends_its_server_is_given_up_and_the_search_goes_on(folder):
    killer = ServerKiller(1, times=MAX_RETRIES + 1)
    result = run(killer, name="server")
    assert [event.number for event in killer.of(TrialBegan)].count(1) == MAX_RETRIES + 1
    assert [trial.is_finished for trial in result.trials] == [True, False, True]


def test_a_later_search_tries_it_again(always):
    killer = Killer(1, times=0)
    again = search(
        SearchRequest(name="always", predict=False, confirm=False),
        listener=killer,
        make_executor=killer.make_executor,
    )
    assert [event.number for event in killer.of(TrialBegan)] == [1]
    assert all(trial.is_finished for trial in again.trials)


@pytest.mark.slow
def test_a_trial_at_which_too_many_workers_died_comes_last(folder):
    """What ends the whole container, worker and all, leaves nobody who could count it."""
    killer = Killer(0, times=0)
    run(killer, name="poison", trials=1)
    with closing(StudyStore(DEFAULT_STORAGE)) as store:
        definition, _ = store.definition("poison")
        [known] = store.trials("poison")
        config = next(
            one for one in definition.legal_space().configurations() if one != known.config
        )
        for _ in range(MAX_RETRIES + 1):
            attempt = store.attempts.claim(
                "poison",
                config,
                worker="dead",
                attempt_id=new_attempt_id(),
                most_trials=2,
                name=None,
            )
            store.attempts.end(attempt.id, "given_up", cause="its worker has ended")
    result = search(
        SearchRequest(name="poison", predict=False, trials=4, confirm=False),
        listener=killer,
        make_executor=killer.make_executor,
    )
    assert [event.number for event in killer.of(TrialBegan)] == [0, 2, 3, 1]
    assert all(trial.is_finished for trial in result.trials)


def test_who_joins_a_study_removes_what_a_killed_search_had_prepared(always, folder):
    work = folder / "studies" / "work" / "autotune"
    dies = (
        "import os, sys, pathlib\nfrom autotune.study.opening.staging import StagingFolder as One\n"
    )
    dies += "one = One(pathlib.Path(sys.argv[1])); one.folder.mkdir(); "
    dies += "print(one.folder, flush=True); os._exit(1)"
    died = subprocess.run(
        [sys.executable, "-c", dies, str(work)], stdout=subprocess.PIPE, text=True, check=False
    )
    left = Path(died.stdout.strip())
    assert left.is_dir()
    killer = Killer(1, times=0)
    search(
        SearchRequest(name="always", predict=False, confirm=False),
        listener=killer,
        make_executor=killer.make_executor,
    )
    assert not [*work.glob(f"{left.name}*")]
