"""Searches on many devices over the recorded table, in virtual time."""

import statistics

import pytest

from studies.many_devices.replay import ENOUGH, run
from studies.search_efficiency import replay

SEEDS = range(2)


@pytest.fixture(scope="module")
def searches():
    """Searches under the middle cap until 99 % of the hypervolume, by the number of devices."""
    return {count: [run("middle", devices=count, seed=seed) for seed in SEEDS] for count in (1, 8)}


@pytest.mark.slow
def test_one_virtual_device_searches_as_the_search_on_one_device_does(searches):
    found = searches[1][0]
    alone = replay.run_ours(replay.cap_of("middle"), sampler="ehvi", seed=0, enough=0.99)
    assert (found["trials"], found["seconds"]) == (alone["trials"], alone["seconds"])


def mean(runs, key):
    return statistics.mean(one[key] for one in runs)


def test_eight_devices_find_the_front_in_a_third_of_the_time(searches):
    assert mean(searches[8], "seconds") < mean(searches[1], "seconds") / 3


def test_eight_devices_need_less_than_twice_the_trials(searches):
    assert mean(searches[8], "trials") < 2 * mean(searches[1], "trials")


def test_two_devices_seldom_compile_the_same_code_at_once(searches):
    again, all_seconds = mean(searches[8], "seconds_compiling_again"), mean(searches[8], "seconds")
    assert again < 0.1 * 8 * all_seconds


@pytest.mark.slow
def test_of_eight_devices_of_which_one_is_used_there_are_the_trials_of_one_device():
    found = [run("tight", devices=8, seed=0, usable=lambda _: 1), run("tight", devices=1, seed=0)]
    assert found[0]["trials"] == found[1]["trials"]


@pytest.mark.slow
def test_each_table_is_searched_under_its_own_cap():
    assert run("tight", devices=8, seed=10, table_name="llama")["reached"] >= ENOUGH


def test_the_devices_are_all_at_work(searches):
    assert mean(searches[8], "share_at_work") > 0.9
