"""Where a study's trials run on this machine."""

import os
import signal

import pytest

from autotune.errors import TrialLost, TrialServerLost
from autotune.execution.local import LocalExecutor
from tests.building.light_server import LIGHT_COMMAND


@pytest.mark.slow
def test_torch_compile_works_from_a_folder_with_a_space_in_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "my studies"
    with LocalExecutor(folder) as executor:
        _, unavailable = executor.probe("cpu", {"compile": ["block"]})
    assert unavailable == {}
    assert list((tmp_path / "cache" / "autotune" / "inductor").glob("*/*")) != []


def test_a_device_that_does_not_answer_is_a_loss(tmp_path, one_trial_server):
    with LocalExecutor(tmp_path) as executor:
        executor.check_device("cpu")
        with pytest.raises(TrialLost, match="cuda:99 does not answer"):
            executor.check_device("cuda:99")


def test_a_server_that_died_is_started_again(tmp_path):
    with LocalExecutor(tmp_path, server_command=LIGHT_COMMAND) as executor:
        lost = executor.server_pid
        os.kill(lost, signal.SIGKILL)
        with pytest.raises(TrialServerLost):
            _check_for_ever(executor)
        executor.check_device("cpu")
        assert executor.server_pid != lost


def _check_for_ever(executor):
    """Until the loss is noticed."""
    while True:
        executor.check_device("cpu")
