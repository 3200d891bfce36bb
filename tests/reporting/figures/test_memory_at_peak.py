"""What holds the memory at the peak of some trials, and where that is known from."""

import dataclasses

import pytest

from autotune.errors import InvalidInput
from autotune.reporting.figures.memory_at_peak import compute, draw
from autotune.reporting.style import OTHER
from tests.building.results import MIB, out_of_memory, record, study_result
from tests.building.views import BASELINE, BLOCK, four_trials, ladder_view, predicted, study_view


def test_baseline_pick_and_front_are_shown_where_none_are_named():
    assert [(bar.number, bar.roles) for bar in compute(ladder_view()).bars] == [
        (0, ("baseline",)),
        (3, ("pick",)),
        (1, ()),
        (2, ()),
    ]


def test_named_trials_are_shown_in_their_order():
    assert [bar.number for bar in compute(ladder_view(), trials=(2, 0)).bars] == [2, 0]


def test_an_unknown_trial_is_rejected_with_the_known_ones():
    with pytest.raises(InvalidInput, match="has no trial 7") as caught:
        compute(ladder_view(), trials=(0, 7))
    assert "0 to 3" in caught.value.hint


def test_measured_categories_come_before_predicted_ones():
    trials = [
        dataclasses.replace(four_trials()[0], peak_bytes_by_category={"parameters": 300 * MIB})
    ]
    (bar,) = compute(ladder_view(trials, front=(), pick=None)).bars
    assert (bar.source, bar.segments) == ("measured", {"parameters": 300.0})


def test_predicted_categories_are_shown_with_the_measured_peak():
    trial = record(0, memory=120 * MIB, config=BLOCK)
    view = study_view(
        study_result([trial], baseline=0), [(BLOCK, predicted(peak=110 * MIB, parameters=10 * MIB))]
    )
    (bar,) = compute(view).bars
    assert (bar.source, bar.segments) == ("predicted", {"parameters": 10.0, "activations": 100.0})
    assert bar.measured_peak == 120.0


def test_without_a_prediction_what_stays_between_steps_is_measured_and_the_rest_is_unattributed():
    trial = record(
        0, memory=120 * MIB, bytes_by_kind={"parameters": 50 * MIB, "optimizer_state": 20 * MIB}
    )
    (bar,) = compute(study_view(study_result([trial], baseline=0))).bars
    assert bar.source == "partly measured"
    assert bar.segments == {"parameters": 50.0, "optimizer_state": 20.0, OTHER: 50.0}


def test_what_is_pinned_on_the_host_is_no_part_of_the_devices_peak():
    kinds = {"parameters": 50 * MIB, "pinned_on_host": 512 * MIB}
    (bar,) = compute(
        study_view(study_result([record(0, memory=120 * MIB, bytes_by_kind=kinds)], baseline=0))
    ).bars
    assert bar.segments == {"parameters": 50.0, OTHER: 70.0}


def test_a_peak_of_which_nothing_else_is_known_is_unattributed():
    (bar,) = compute(study_view(study_result([record(0, memory=120 * MIB)], baseline=0))).bars
    assert bar.segments == {OTHER: 120.0}


def test_the_note_says_where_the_bytes_are_known_from():
    trials = [
        dataclasses.replace(four_trials()[0], peak_bytes_by_category={"parameters": MIB}),
        *four_trials()[1:],
    ]
    note = compute(ladder_view(trials)).note
    assert "from the allocator's history (#0)" in note
    assert "predicted, with the measured peak as a mark (#3, #1, #2)" in note


def test_the_bars_are_stacked_and_the_measured_peak_is_a_mark():
    drawing = draw(compute(ladder_view()))
    (segment,) = [trace for trace in drawing.data if trace.type == "bar"]
    assert (drawing.layout.barmode, segment.x) == ("stack", (400.0, 100.0, 200.0, 250.0))
    assert next(trace for trace in drawing.data if trace.name == "measured peak").x == (
        400.0,
        100.0,
        200.0,
        250.0,
    )


def test_the_cap_is_named_as_it_is_everywhere():
    trial = record(
        0, memory=1536 * MIB, outcome="over_cap", bytes_by_kind={"parameters": 1536 * MIB}
    )
    drawing = draw(compute(study_view(study_result([trial], baseline=0, cap_bytes=48 * MIB))))
    assert [one.text for one in drawing.layout.annotations] == ["cap 48.00 MiB"]


def test_the_cap_of_a_gpu_is_no_line_over_these_bytes():
    trial = record(0, config=BASELINE)
    view = study_view(study_result([trial], baseline=0, device="cuda:0"), [(BASELINE, predicted())])
    assert compute(view).cap is None
    assert "applies to more than these bytes" in compute(view).note


def test_a_study_of_which_no_peak_is_known_is_rejected():
    failed = study_view(study_result([out_of_memory(0), out_of_memory(1)], baseline=0))
    with pytest.raises(
        InvalidInput,
        match="none of the 2 trials of study 'study' has a peak, measured or predicted",
    ):
        compute(failed)
    with pytest.raises(
        InvalidInput, match="none of the 2 trials of study 'study' named has a measured"
    ):
        compute(failed, trials=(1,))
