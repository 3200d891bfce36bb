"""Hypervolume and its expected improvement, compared with Optuna's and with sampling."""

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna._hypervolume import compute_hypervolume

from autotune.study.sampler.ehvi import (
    Point,
    expected_hypervolume_improvement,
    hypervolume,
    not_dominated,
)

REFERENCE = Point(memory=10.0, speed=1.0, perplexity=6.0)
_NUMBERS = st.floats(0.5, 12.0).map(lambda value: round(value, 1))
_POINTS = st.builds(
    lambda m, s, p: Point(memory=m, speed=s, perplexity=p), _NUMBERS, _NUMBERS, _NUMBERS
)


def optunas(points):
    rows = [(point.memory, -point.speed, point.perplexity) for point in points]
    inside = [row for row in rows if row[0] <= 10.0 and row[1] <= -1.0 and row[2] <= 6.0]
    return (
        compute_hypervolume(numpy.array(inside), numpy.array([10.0, -1.0, 6.0])) if inside else 0.0
    )


def gain_of(points, candidate, *, deviation):
    [gain] = expected_hypervolume_improvement(
        points,
        reference=REFERENCE,
        memory=numpy.array([candidate.memory]),
        perplexity=numpy.array([candidate.perplexity]),
        speed_mean=numpy.array([candidate.speed]),
        speed_deviation=numpy.array([deviation]),
    )
    return gain


@given(st.lists(_POINTS, max_size=7))
@settings(max_examples=60, deadline=None)
def test_the_hypervolume_is_that_of_optuna(points):
    assert hypervolume(points, reference=REFERENCE) == pytest.approx(optunas(points), abs=1e-9)


@given(st.lists(_POINTS, max_size=6), _POINTS)
@settings(max_examples=60, deadline=None)
def test_with_a_known_speed_the_improvement_is_what_is_added_to_the_hypervolume(points, candidate):
    added = optunas([*points, candidate]) - optunas(points)
    assert gain_of(points, candidate, deviation=0.0) == pytest.approx(added, abs=1e-6)


def test_the_expected_improvement_is_the_mean_over_the_possible_speeds():
    points = [Point(memory=3, speed=4, perplexity=3), Point(memory=6, speed=7, perplexity=2)]
    candidate = Point(memory=4, speed=5, perplexity=2.5)
    quantiles = numpy.random.default_rng(0).normal(candidate.speed, 2.0, size=4000)
    gains = [
        gain_of(points, Point(memory=4, speed=speed, perplexity=2.5), deviation=0.0)
        for speed in quantiles
    ]
    assert gain_of(points, candidate, deviation=2.0) == pytest.approx(numpy.mean(gains), rel=0.03)


def test_what_needs_more_than_the_reference_improves_nothing():
    assert gain_of([], Point(memory=11, speed=9, perplexity=1), deviation=1.0) == 0.0


@given(st.lists(_POINTS, max_size=7))
@settings(max_examples=60, deadline=None)
def test_what_is_not_dominated_has_all_of_the_hypervolume(points):
    kept = hypervolume(not_dominated(points), reference=REFERENCE)
    assert kept == pytest.approx(hypervolume(points, reference=REFERENCE))
