"""Whole searches over the recorded table of `studies/search_efficiency/`: the real study code, no training."""

import sys
from pathlib import Path

import pytest

STUDY = Path(__file__).parents[2] / "studies" / "search_efficiency"


@pytest.fixture(scope="module")
def replay():
    sys.path.insert(0, str(STUDY))
    try:
        import replay

        yield replay
    finally:
        sys.path.remove(str(STUDY))


@pytest.fixture(scope="module")
def middle(replay):
    """A search under the middle cap, until it has found nearly all there is."""
    return replay.run_ours(replay.cap_of("middle"), sampler="ehvi", seed=0, enough=0.95)


@pytest.fixture(scope="module")
def converged(replay):
    return replay.run_ours(replay.cap_of("tight"), sampler="ehvi", seed=0, enough=2.0, until_converged=True)


def test_it_finds_nearly_all_of_the_exhaustive_front_at_a_tenth_of_its_cost(replay, middle):
    seconds, _, reached = middle["steps"][-1]
    assert (reached >= 0.95, seconds <= 0.1 * replay.the_table().exhaustive_seconds()) == (True, True)


def test_hardly_a_training_is_over_the_cap(middle):
    assert middle["over_cap"] <= 0.05 * middle["trainings"]


def test_it_ends_once_nothing_is_likely_to_get_better(converged):
    _, trials, reached = converged["converged_at"] or (0, converged["trials"], converged["steps"][-1][2])
    assert (reached > 0.95, trials < 60) == (True, True)


def test_the_same_seed_searches_in_the_same_way(replay, converged):
    again = replay.run_ours(replay.cap_of("tight"), sampler="ehvi", seed=0, enough=2.0, until_converged=True)
    assert again["steps"] == converged["steps"]


def test_another_seed_searches_in_another_way(replay, converged):
    other = replay.run_ours(replay.cap_of("tight"), sampler="ehvi", seed=1, enough=2.0, until_converged=True)
    assert other["ended_at"] != converged["ended_at"]


def test_a_time_budget_is_kept_to_within_one_trial(replay):
    found = replay.run_ours(replay.cap_of("loose"), sampler="ehvi", seed=0, enough=2.0, deadline=60.0)
    *_, before_the_last, _ = found["ended_at"]
    assert before_the_last < 60.0


@pytest.mark.parametrize("sampler", ["tpe", pytest.param("gp", marks=pytest.mark.slow), "nsga2", "random"])
def test_every_sampler_of_optunas_searches_it(replay, sampler):
    found = replay.run_ours(replay.cap_of("loose"), sampler=sampler, seed=0, most=14)
    assert found["trials"] == 14
