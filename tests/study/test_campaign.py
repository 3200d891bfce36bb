"""The program of 3,000 kills: which part is next, and that a small part of it finds nothing."""

import pytest

from studies.reliability import campaign


def part(way, kills):
    return {"way": way, "kills": kills, "violations": []}


@pytest.mark.parametrize(
    ("kills", "way"),
    [
        ({}, "sqlite"),
        ({"sqlite": 150}, "postgresql"),
        ({"sqlite": 450, "postgresql": 450, "ray": 301, "service": 299}, "service"),
        (campaign.SHARES, None),
    ],
)
def test_the_next_part_is_of_the_way_that_is_furthest_behind_its_share(kills, way):
    assert campaign.furthest_behind([part(*each) for each in kills.items()]) == way


def test_the_page_shows_the_sums_of_the_parts():
    page = campaign.RESULTS.with_name("README.md").read_text()
    assert campaign.table(campaign.parts_so_far()) in page


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sqlite", "service"])
def test_kills_lose_no_result_and_no_search(way):
    seen = campaign.carry_out_part(way, seed=1, kills=6, seconds=600.0)
    assert (seen["kills"], seen["violations"]) == (6, [])
