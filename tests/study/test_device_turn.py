"""Turns on a device: one trial at a time, over processes, until the last process of the trial is gone."""

import fcntl
import os
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest

from autotune.executors.device_turn import DeviceTurns
from autotune.result import DeviceInfo

CPU = DeviceInfo(device="cpu", name="a CPU", total_memory_bytes=2**30, versions={})


class Waited(Exception):
    pass


def give_up():
    raise Waited


@pytest.fixture
def turns_on(tmp_path):
    """turns_on(device, places=2) are the turns of one search."""
    opened = []

    def make(device=CPU, **options):
        opened.append(DeviceTurns(device, folder=tmp_path, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def test_one_search_has_the_turn_at_a_time(turns_on):
    with turns_on().turn(give_up), pytest.raises(Waited), turns_on().turn(give_up):
        pass


def test_the_turn_is_free_again_afterwards(turns_on):
    with turns_on().turn(give_up):
        pass
    with turns_on().turn(give_up):
        pass


def test_the_turn_is_free_again_after_an_error(turns_on):
    with pytest.raises(KeyError), turns_on().turn(give_up):
        raise KeyError
    with turns_on().turn(give_up):
        pass


def test_as_many_turns_as_places_at_a_time(turns_on):
    searches = [turns_on(places=2) for _ in range(3)]
    with searches[0].turn(give_up), searches[1].turn(give_up), pytest.raises(Waited), searches[2].turn(give_up):
        pass


def test_another_device_has_turns_of_its_own(turns_on):
    other = DeviceInfo(device="cuda:1", name="a GPU", total_memory_bytes=2**30, versions={}, uuid="GPU-1")
    with turns_on().turn(give_up), turns_on(other).turn(give_up):
        pass


def test_a_device_that_changes_its_index_is_still_the_same(turns_on):
    names = ("cuda:0", "cuda:1")
    one, other = (
        DeviceInfo(device=name, name="a GPU", total_memory_bytes=2**30, versions={}, uuid="GPU-7") for name in names
    )
    with turns_on(one).turn(give_up), pytest.raises(Waited), turns_on(other).turn(give_up):
        pass


def test_the_turn_of_a_killed_process_is_free(turns_on, tmp_path):
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from autotune.executors.device_turn import DeviceTurns\n"
        "from autotune.result import DeviceInfo\n"
        "cpu = DeviceInfo(device='cpu', name='', total_memory_bytes=1, versions={})\n"
        "with DeviceTurns(cpu, folder=Path(sys.argv[1])).turn(lambda: None):\n"
        "    print('mine', flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with pytest.raises(Waited), turns_on().turn(give_up):
            pass
        holder.kill()
    with turns_on().turn(give_up):
        pass


def test_a_turn_does_not_begin_while_a_trial_of_the_last_one_still_runs(turns_on):
    with turns_on().turn(give_up) as held:
        trial = os.open(held, os.O_RDWR)
        fcntl.flock(trial, fcntl.LOCK_SH)  # as the trial's process does
    with pytest.raises(Waited), turns_on().turn(give_up):
        pass
    os.close(trial)
    with turns_on().turn(give_up):
        pass


def test_who_waits_comes_before_who_has_just_had_a_turn(turns_on):
    first, second = turns_on(), turns_on()
    order, waits = [], threading.Event()

    def wait_for_it():
        def pause():
            waits.set()
            time.sleep(0.001)

        with second.turn(pause):
            order.append("second")

    with first.turn(give_up):
        waiting = threading.Thread(target=wait_for_it)
        waiting.start()
        assert waits.wait(10)
    with first.turn(lambda: time.sleep(0.001)):
        order.append("first")
    waiting.join(10)
    assert order == ["second", "first"]


def test_closed_turns_leave_no_file_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with closing(DeviceTurns(CPU, folder=tmp_path)) as turns, turns.turn(give_up):
        pass
    assert len(os.listdir("/proc/self/fd")) == before
