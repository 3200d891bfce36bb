"""The roofline figure: which trials are in it, and where."""

import dataclasses

import pytest

from autotune.errors import InvalidInput
from autotune.reporting.figures.roofline import compute, draw
from autotune.spec.result import Pick
from tests.building.results import study_result
from tests.building.views import ladder_view, many_trials, predicted, study_view

PICK = Pick(number=1, criterion="the fastest")


def view(**changes):
    return ladder_view(many_trials(4), front=(1, 3), pick=PICK, baseline=0, **changes)


def test_a_trial_is_at_its_flops_per_byte_and_per_second():
    point = compute(view()).points[1]
    assert point.found.flops_per_byte == pytest.approx(15.0)
    assert point.found.flops_per_second == pytest.approx(1.5e6 * 8001.0)


def test_recomputed_flops_are_told_apart():
    plain, checkpointed = compute(view()).points[:2]
    assert plain.recomputed_per_second == 0.0
    assert checkpointed.recomputed_per_second == pytest.approx(5e5 * 8001.0)


def test_each_number_format_of_the_trials_has_a_roof():
    assert compute(view()).roofs == {"fp32": 4e10, "bf16": 1e11}


def test_a_trial_without_a_prediction_is_drawn_only_with_one_made_for_it():
    trials = many_trials(2)
    without = study_view(study_result(trials, pick=PICK), [(trials[0].config, predicted())])
    figure = compute(without)
    assert [point.number for point in figure.points] == [0]
    assert "Not drawn: 1 trial that was not predicted" in figure.note
    made = {trials[1].config.fingerprint: predicted()}
    assert [point.number for point in compute(without, made).points] == [0, 1]


def test_a_study_of_a_device_that_was_not_measured_has_no_roofline():
    known = view()
    device = dataclasses.replace(known.result.device, matrix_flops_per_second=None)
    result = dataclasses.replace(known.result, device=device)
    with pytest.raises(InvalidInput, match="can be compared with its device"):
        compute(dataclasses.replace(known, result=result))


def test_without_the_speed_of_the_memory_the_reason_is_that_and_not_the_trials():
    known = view()
    device = dataclasses.replace(known.result.device, bandwidth_bytes_per_second=None)
    result = dataclasses.replace(known.result, device=device)
    with pytest.raises(InvalidInput, match=r"the speed of the memory of .* is not known"):
        compute(dataclasses.replace(known, result=result))


def test_the_pick_is_a_star():
    symbols = [
        symbol for trace in draw(compute(view())).data for symbol in trace.marker.symbol or ()
    ]
    assert symbols.count("star") == 1
