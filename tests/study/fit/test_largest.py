"""The bisection, on needs of every shape: what it claims was looked at, and it looks little."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.analysis.largest import find_largest, find_smallest

MOST = 400
SIZES = st.integers(0, 1000)


@st.composite
def growing_needs(draw):
    """The needs of the values 1, 2, ...: linear, curved or in steps, never decreasing."""
    offset, slope, curve = draw(SIZES), draw(st.integers(0, 20)), draw(st.floats(0, 2))
    steps = draw(st.lists(st.tuples(st.integers(1, MOST), SIZES), max_size=4))
    values = range(1, draw(st.integers(1, MOST)) + 1)
    return [
        offset
        + slope * value
        + int(curve * value**2)
        + sum(height for where, height in steps if value >= where)
        for value in values
    ]


def looked_for(needs, *, cap, start, values=None):
    """Returns the result for `needs` of the values 1, 2, ... or `values`, and the calls made."""
    values = range(1, len(needs) + 1) if values is None else values
    looked: list[int] = []

    def need(value):
        looked.append(value)
        return needs[values.index(value)]

    return find_largest(need, cap=cap, values=values, start=start), looked


@given(needs=growing_needs(), cap=st.integers(0, 20_000), start=st.integers(1, 2 * MOST))
def test_of_a_growing_need_the_largest_value_that_fits_is_found(needs, cap, start):
    found, _ = looked_for(needs, cap=cap, start=start)
    fitting = [value for value, size in enumerate(needs, 1) if size <= cap]
    assert found.value == (fitting[-1] if fitting else None)


@given(needs=st.lists(SIZES, min_size=1, max_size=MOST), cap=SIZES, start=st.integers(1, MOST))
def test_whatever_the_need_the_value_fits_and_its_successor_was_seen_not_to(needs, cap, start):
    found, looked = looked_for(needs, cap=cap, start=start)
    assert found.value is None or found.needs[found.value] <= cap
    assert found.successor == (None if found.value == len(needs) else (found.value or 0) + 1)
    assert found.successor is None or found.needs[found.successor] > cap
    assert sorted(looked) == sorted(found.needs)


@given(needs=growing_needs(), cap=st.integers(0, 20_000), start=st.integers(1, MOST))
def test_no_value_is_looked_at_twice(needs, cap, start):
    _, looked = looked_for(needs, cap=cap, start=start)
    assert len(looked) == len(set(looked))


@given(offset=SIZES, slope=st.integers(1, 50), cap=st.integers(0, 5000), start=st.integers(1, MOST))
def test_a_straight_need_takes_few_looks(offset, slope, cap, start):
    needs = [offset + slope * value for value in range(1, 10_001)]
    found, looked = looked_for(needs, cap=cap, start=start)
    fits = found.value or 0
    assert len(looked) <= (4 if start <= fits <= 16 * start else 12)


def test_of_a_need_that_does_not_rise_about_the_binary_logarithm_of_the_values_is_looked_at():
    _, looked = looked_for([5] * 1023, cap=10, start=1)
    assert len(looked) <= 12


@given(where=st.integers(1, 5000), start=st.integers(1, 5000))
def test_a_cliff_takes_no_more_looks_than_a_few_bisections(where, start):
    needs = [0 if value < where else 10**9 for value in range(1, 5001)]
    found, looked = looked_for(needs, cap=5, start=start)
    assert (found.value or 0) == where - 1
    assert len(looked) <= 60


@given(data=st.data())
def test_only_the_values_there_are_can_be_found(data):
    values = sorted(data.draw(st.sets(st.integers(1, 64), min_size=1)))
    cap, start = data.draw(st.integers(0, 64)), data.draw(st.integers(1, 64))
    found, _ = looked_for(values, cap=cap, start=start, values=values)
    assert found.value == max((value for value in values if value <= cap), default=None)


@pytest.mark.parametrize(
    ("cap", "smallest", "before"), [(1000, 1, None), (300, 4, 2), (200, 8, 4), (100, None, 64)]
)
def test_of_a_need_that_falls_the_smallest_value_is_found(cap, smallest, before):
    values = [1, 2, 4, 8, 16, 32, 64]
    found = find_smallest(lambda count: 110 + 720 // count, cap=cap, values=values, start=8)
    assert (found.value, found.successor) == (smallest, before)
