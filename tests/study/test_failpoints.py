"""A search killed at each failpoint and resumed: nothing is lost, changed or counted twice.

`studies/reliability/crash_points.py` does the same at more visits and on PostgreSQL.
"""

import pytest

from autotune.system.failpoints import FAILPOINTS
from studies.reliability import crash_points


@pytest.fixture(scope="module", autouse=True)
def _imported(tmp_path_factory):
    """Run a search first, so that forks have all that they need."""
    folder = tmp_path_factory.mktemp("warm")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        crash_points.begin(f"sqlite:///{folder}/warm.db")


@pytest.mark.parametrize("name", FAILPOINTS)
def test_a_search_killed_there_is_continued_and_nothing_is_lost_or_doubled(name, tmp_path):
    [point] = [one for one in crash_points.points(visits=1) if one.name == name]
    assert (
        crash_points.found_at(point, url=f"sqlite:///{tmp_path}/points.db", folder=tmp_path) == []
    )


def test_a_point_that_is_not_reached_is_told(tmp_path):
    never = crash_points.Point(name="attempt lost")
    [found] = crash_points.found_at(never, url=f"sqlite:///{tmp_path}/points.db", folder=tmp_path)
    assert "was not killed" in found
