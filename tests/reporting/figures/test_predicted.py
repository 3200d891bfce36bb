"""Predicted against measured peaks."""

import pytest

from autotune.errors import InvalidInput
from autotune.reporting.figures.predicted import compute, draw
from tests.building.results import MIB, record, study_result
from tests.building.views import config, failures_only, predicted, study_view

EAGER, COMPILED = config(), config(compile="block", precision="bf16-mixed")


def view():
    trials = [
        record(0, memory=101 * MIB, config=EAGER),
        record(1, memory=260 * MIB, config=COMPILED),
    ]
    return study_view(
        study_result(trials),
        [(EAGER, predicted(peak=100 * MIB)), (COMPILED, predicted(peak=200 * MIB))],
    )


def test_a_point_has_its_prediction_measurement_and_bounds():
    point = compute(view()).points[0]
    assert (point.predicted, point.measured, point.lower, point.upper) == (
        100.0,
        101.0,
        90.0,
        110.0,
    )


def test_a_point_outside_its_bounds_is_known_and_counted():
    figure = compute(view())
    assert [point.is_inside for point in figure.points] == [True, False]
    assert "median 1.1550, from 1.0100 to 1.3000; 1 outside the bounds" in figure.note


def test_a_trial_without_a_prediction_is_no_point():
    trials = [*view().result.trials, record(2, config=config(loss="chunked"))]
    both = [(EAGER, predicted()), (COMPILED, predicted())]
    assert [point.number for point in compute(study_view(study_result(trials), both)).points] == [
        0,
        1,
    ]


def test_groups_with_different_errors_have_different_marks():
    marks = [trace for trace in draw(compute(view())).data if trace.mode == "markers"]
    assert {trace.name for trace in marks} == {"eager fp32", "compiled 16-bit"}
    assert len({trace.marker.symbol for trace in marks}) == 2


def test_the_lower_panel_shows_the_error():
    drawing = draw(compute(view()))
    below = [trace for trace in drawing.data if trace.mode == "markers" and trace.yaxis == "y2"]
    assert sorted(round(trace.y[0], 6) for trace in below) == [1.0, 30.0]


def test_a_hover_text_says_what_the_lower_panel_shows():
    assert "measured 101.0 MiB: +1.00 %" in compute(view()).points[0].hover


def test_the_bounds_are_a_band():
    edges = [
        trace
        for trace in draw(compute(view())).data
        if trace.name == "bounds, eager fp32" and trace.yaxis == "y"
    ]
    assert [trace.y for trace in edges] == [(90.0,), (110.0,)]
    assert edges[1].fill == "tonexty"


def test_without_a_pair_there_is_one_sentence():
    with pytest.raises(InvalidInput, match="has both a predicted and a measured peak"):
        compute(failures_only())
