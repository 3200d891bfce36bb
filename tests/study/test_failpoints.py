"""A search killed at each failpoint and resumed: nothing is lost, changed or counted twice.

`studies/reliability/crash_points.py` does the same at more visits and on PostgreSQL.
"""

import importlib
import sys
from pathlib import Path

import pytest

from autotune.failpoints import FAILPOINTS

STUDY = Path(__file__).parents[2] / "studies" / "reliability"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The study's script; a search is run first, so that forks have all that they need."""
    sys.path.insert(0, str(STUDY))
    try:
        found = importlib.import_module("crash_points")
        folder = tmp_path_factory.mktemp("warm")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            found.begin(f"sqlite:///{folder}/warm.db")
        yield found
    finally:
        sys.path.remove(str(STUDY))


@pytest.mark.parametrize("name", FAILPOINTS)
def test_a_search_killed_there_is_continued_and_nothing_is_lost_or_doubled(study, name, tmp_path):
    [point] = [one for one in study.points(visits=1) if one.name == name]
    assert study.found_at(point, url=f"sqlite:///{tmp_path}/points.db", folder=tmp_path) == []


def test_a_point_that_is_not_reached_is_told(study, tmp_path):
    never = study.Point(name="attempt lost")
    [found] = study.found_at(never, url=f"sqlite:///{tmp_path}/points.db", folder=tmp_path)
    assert "was not killed" in found
