"""The CPUs of trials that run at once."""

import os
from pathlib import Path

import pytest

import autotune
from autotune.execution import cpu_shares as module
from autotune.execution.cpu_shares import cpu_share, cpu_shares, usable_cpus


@pytest.mark.parametrize("places", [2, 3, 5, 16, 20])
def test_places_have_equal_shares_of_the_cpus(places, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(100, 116)})
    shares = cpu_shares(places)
    assert len(shares) == places
    sizes = [len(share) for share in shares]
    assert set(sizes) == {max(1, 16 // places)}
    if places <= 16:
        assert len({cpu for share in shares for cpu in share}) == sum(sizes)


def test_a_single_place_is_bound_to_no_cpus():
    assert cpu_shares(1) == [None]


def test_no_more_cpus_are_used_than_a_cluster_says_the_node_has(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(16)})
    shares = [cpu_share(place, of=2, most_cpus=4) for place in range(2)]
    assert shares == [(0, 1), (2, 3)]


def test_a_single_place_on_a_part_of_a_node_is_bound_to_that_part(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(16)})
    assert cpu_share(0, of=1, most_cpus=4) == (0, 1, 2, 3)


def test_a_system_that_does_not_say_which_cpus_a_process_has_gives_it_all(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert usable_cpus() == (0, 1, 2)


def test_nobody_else_asks_the_system_which_cpus_a_process_has():
    """It has no such function on macOS and Windows."""
    package = Path(autotune.__file__).parent
    asking = [file for file in package.rglob("*.py") if "os.sched_getaffinity(" in file.read_text()]
    assert asking == [Path(module.__file__)]
