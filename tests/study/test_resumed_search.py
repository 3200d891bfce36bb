"""A search that is killed and resumed makes the same suggestions in the same order.

`studies/reliability/resume.py` does the same for every trial and every sampler.
"""

import pytest

from autotune.spec.study import SAMPLERS
from studies.reliability import resume

QUICK = [("ehvi", 1), ("ehvi", 9), ("ehvi", 15), ("tpe", 12), ("nsga2", 15)]
ALL = [(sampler, k) for sampler in SAMPLERS for k in (1, 9, 12, 15, 19)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """whole(sampler): what an uninterrupted search suggests."""
    known = {}

    def suggestions(sampler):
        if sampler not in known:
            known[sampler] = resume.suggestions(sampler, tmp_path_factory.mktemp("whole") / "study")
        return known[sampler]

    return suggestions


@pytest.mark.parametrize(
    ("sampler", "k"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in dict.fromkeys([*QUICK, *ALL])
    ],
)
def test_a_search_killed_at_a_trial_and_continued_suggests_what_an_uninterrupted_one_does(
    whole, tmp_path, sampler, k
):
    if sampler == "gp":
        pytest.importorskip("scipy")
    uninterrupted = whole(sampler)
    assert len(uninterrupted) == resume.TRIALS
    continued = resume.suggestions(sampler, tmp_path / "study", kill_at=[f"trial claimed:{k}"])
    assert continued == uninterrupted
