"""Predicted against measured speeds."""

from dataclasses import replace

import pytest

from autotune.errors import InvalidInput
from autotune.reporting.figures.predicted_speed import compute, plot
from tests.building.results import record, study_result
from tests.building.views import config, predicted, study_view

EAGER, COMPILED = config(), config(compile="block", precision="bf16-mixed")
COUNTED = replace(predicted(), operators_per_token=0.1)


def view(*, predictions=((EAGER, COUNTED), (COMPILED, COUNTED)), **device):
    trials = [record(0, speed=1000.0, config=EAGER), record(1, speed=9000.0, config=COMPILED)]
    result = study_result(trials)
    return study_view(replace(result, device=replace(result.device, **device)), predictions)


def test_a_point_has_the_speed_that_the_probed_rates_give_its_prediction():
    point = compute(view(operator_seconds=1e-6)).points[0]
    assert point.measured == 1000.0
    assert point.lower < point.predicted < point.upper


def test_the_predicted_speed_is_computed_anew_from_a_stored_prediction():
    slow = compute(view(operator_seconds=1e-2)).points[0]
    fast = compute(view(operator_seconds=1e-6)).points[0]
    assert slow.predicted < fast.predicted


def test_what_most_of_the_time_is_for_is_in_the_hover_text():
    assert (
        "operators that the host launches" in compute(view(operator_seconds=1e-2)).points[0].hover
    )


def test_a_study_whose_device_was_not_probed_has_no_such_figure():
    with pytest.raises(InvalidInput, match="has both a predicted and a measured speed"):
        compute(view(matrix_flops_per_second=None))


def test_it_is_drawn_with_its_unit():
    assert plot(view(), None).layout.xaxis2.title.text == "predicted speed, tokens/s"
