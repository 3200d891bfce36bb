"""The locks of trials that use several devices: each device of a group is held."""

import os
import uuid
from contextlib import contextmanager

import pytest

from autotune.errors import Stopped, TrialLost
from autotune.execution.local import LocalExecutor
from autotune.execution.process.request import _hold_slot
from autotune.spec.result import DeviceInfo
from tests.building.flows import as_flow
from tests.execution.test_device_slots import forked


@pytest.fixture(params=["sockets", "files"])
def gpus(request, monkeypatch, tmp_path):
    """Three devices whose locks no other test has, in the order of their names."""
    if request.param == "files":
        monkeypatch.setenv("AUTOTUNE_LOCK_FOLDER", str(tmp_path / "locks"))
    else:
        monkeypatch.delenv("AUTOTUNE_LOCK_FOLDER", raising=False)
    own = uuid.uuid4().hex[:8]
    return [
        DeviceInfo(
            device=f"cuda:{number}",
            name="a GPU",
            total_memory_bytes=2**30,
            versions={},
            uuid=f"GPU-{own}-{number}",
        )
        for number in range(3)
    ]


@pytest.fixture
def search(tmp_path):
    """search(first, *others) is the executor of a search that stops as soon as it has to wait."""
    made = []

    def make(first, *others):
        executor = LocalExecutor(tmp_path, should_stop=lambda: True, note=lambda sentence: None)
        executor.other_devices = others
        made.append(executor)
        return _Search(executor, first)

    yield make
    for executor in made:
        executor.shutdown()


class _Search:
    def __init__(self, executor, first):
        self.executor, self._first, self.holders = executor, first, []

    @contextmanager
    def slot(self, *, places=1, alone=False):
        with self.executor.slot(
            self._first, places=places, on_wait=self.holders.append, alone=alone
        ):
            yield

    def waits(self, **options):
        try:
            with self.slot(**options):
                return False
        except Stopped:
            return True


def test_a_group_waits_for_each_of_its_devices(gpus, search):
    for number in range(3):
        with search(gpus[number]).slot():
            assert search(*gpus).waits()
    assert not search(*gpus).waits()


def test_a_search_waits_for_a_group_that_has_its_device(gpus, search):
    with search(gpus[0], gpus[2]).slot():
        assert search(gpus[2]).waits()
        assert not search(gpus[1]).waits()
    assert not search(gpus[2]).waits()


def test_a_group_that_waits_gives_back_what_it_had(gpus, search):
    with search(gpus[2]).slot():
        assert search(*gpus).waits()
        assert not search(gpus[0]).waits()


def test_processes_of_a_trial_hold_each_device_until_they_have_ended(gpus, search):
    group = search(gpus[0], gpus[1])
    with group.slot():
        held = group.executor._held
        still_ending = forked(lambda: [_hold_slot(lock) for lock in held])
        still_ending.__enter__()
    for gpu in gpus[:2]:
        assert search(gpu).waits()
    still_ending.__exit__(None, None, None)
    assert not search(gpus[0], gpus[1]).waits()


def test_two_trials_at_a_time_have_a_slot_each_on_every_device_of_a_group(gpus, search):
    with search(*gpus).slot(places=2), search(*gpus).slot(places=2):
        assert search(*gpus).waits(places=2)
        assert search(gpus[1]).waits(places=2)


def test_a_confirmation_has_a_shared_group_alone(gpus, search):
    with search(gpus[1]).slot(places=2):
        assert search(*gpus).waits(places=2, alone=True)
    with search(*gpus).slot(places=2, alone=True):
        assert search(gpus[2]).waits(places=2)


def test_all_searches_take_devices_in_the_same_order_whatever_their_numbers(gpus, search):
    """Else one that has the first and one that has the last would wait for each other."""

    def have_the_first():
        slot = search(gpus[0]).slot()
        slot.__enter__()
        return slot

    with forked(have_the_first), search(gpus[2]).slot():
        for order in (gpus, gpus[::-1]):
            group = search(*order)
            assert group.waits()
            assert group.holders[0].startswith("process ")
            assert f"process {os.getpid()} " not in group.holders[0]


def test_a_device_that_is_lost_is_noticed_wherever_it_is_in_a_group(gpus, search, monkeypatch):
    group = search(*gpus)
    asked = []

    def check(task):
        asked.append(task.device)
        if task.device == "cuda:1":
            raise TrialLost("cuda:1 does not answer")

    monkeypatch.setattr(group.executor, "perform", as_flow(check))
    with pytest.raises(TrialLost, match="cuda:1 does not answer"):
        group.executor.check_device("cuda:0")
    assert asked == ["cuda:0", "cuda:1"]
