import pytest

from autotune.analysis.published_comparison import compare_with_published, is_of_published_size
from autotune.spec.config import TrainingConfig
from autotune.spec.published_table import Figures, Reference
from autotune.spec.space_file import load_space
from autotune.spec.workload import make_workload
from tests.building.results import GIB, record
from tests.building.studies import definition

REFERENCE = Reference(
    source="a paper",
    measured_on="one GPU",
    control="control",
    rows={
        "control": Figures(peak_memory_bytes=20 * GIB, tokens_per_second=1000.0, perplexity=12.0),
        "fused": Figures(peak_memory_bytes=5 * GIB, tokens_per_second=1500.0, perplexity=13.0),
        "compile": Figures(peak_memory_bytes=15 * GIB),
    },
)
TABLE = load_space("peak_memory")
OF_PUBLISHED_SIZE = definition(space=TABLE, workload=make_workload("cuda", TABLE.workload))
CONTROL = TrainingConfig(optimizer="adafactor-fixed-rate", micro_batch_size=4)
FUSED = TrainingConfig(
    optimizer="adafactor-fixed-rate", optimizer_fusion="backward", micro_batch_size=4
)
TRIALS = (
    record(0, memory=10 * GIB, speed=100.0, config=CONTROL),
    record(1, memory=4 * GIB, speed=200.0, config=FUSED, name="another name"),
)


def rows(trials=TRIALS, *, study=OF_PUBLISHED_SIZE):
    return {row.name: row for row in compare_with_published(REFERENCE, study, trials)}


def row_of_fused(**changes):
    """Returns the row of a study whose only trial is configured as `fused`."""
    defaults = {"memory": None, "speed": None, "perplexity": None, "config": FUSED}
    return rows([record(3, **(defaults | changes))])["fused"]


def test_savings_are_relative_to_the_control_of_the_same_table():
    fused = rows()["fused"]
    assert (fused.saved, fused.published_saved) == pytest.approx((0.6, 0.75))


def test_the_difference_of_savings_is_the_studys_less_the_published():
    assert rows()["fused"].saved_difference == pytest.approx(-0.15)


def test_speeds_are_relative_to_the_control_of_the_same_table():
    fused = rows()["fused"]
    assert (fused.speed, fused.published_speed) == pytest.approx((2.0, 1.5))
    assert fused.speed_ratio == pytest.approx(2.0 / 1.5)


def test_the_control_is_the_unit_of_everything():
    control = rows()["control"]
    units = (control.saved, control.speed, control.published_saved, control.published_speed)
    assert units == (0, 1, 0, 1)


def test_peaks_of_the_same_size_have_a_ratio():
    assert rows()["fused"].peak_ratio == pytest.approx(0.8)


def test_peaks_of_another_size_have_none():
    workload = make_workload("cuda", TABLE.workload, {"layers": 2})
    assert rows(study=definition(space=TABLE, workload=workload))["fused"].peak_ratio is None


def test_without_a_control_nothing_is_relative_to_it():
    fused = rows(TRIALS[1:])["fused"]
    relative = (fused.saved, fused.speed, fused.saved_difference, fused.speed_ratio)
    assert relative == (None, None, None, None)
    assert fused.published_saved == pytest.approx(0.75)


def test_a_row_is_found_by_its_configuration_whatever_the_trial_is_called():
    assert (rows()["fused"].trial, rows()["fused"].peak_memory_bytes) == (1, 4 * GIB)


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        ({"outcome": "predicted_over_cap"}, "predicted over cap"),
        # What a training held when it ran out of memory is no peak.
        ({"outcome": "out_of_memory", "memory": 2 * GIB}, "out of memory"),
    ],
)
def test_a_peak_that_was_not_measured_is_the_predicted_one_and_says_so(changes, remark):
    row = row_of_fused(predicted_peak_memory_bytes=9 * GIB, **changes)
    assert (row.peak_memory_bytes, row.peak_is_predicted, row.remark) == (9 * GIB, True, remark)
    assert row.speed is None


def test_without_a_prediction_the_peak_of_what_ran_out_of_memory_is_not_known():
    row = row_of_fused(outcome="out_of_memory", memory=2 * GIB)
    assert (row.peak_memory_bytes, row.peak_is_predicted) == (None, False)


def test_a_row_that_was_not_tried_says_so():
    assert rows([])["fused"].remark == "not tried"


def test_a_row_that_does_not_work_here_says_so():
    study = definition(
        space=TABLE,
        workload=OF_PUBLISHED_SIZE.workload,
        unavailable={"compile": {"model": "no compiler"}},
    )
    assert rows([], study=study)["compile"].remark == "cannot be trained here"


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "changes", "is_same"),
    [
        (None, {}, True),
        ("full", {}, True),
        ("full", {"steps": 20, "dataset": "python-docs"}, True),
        ("small", {}, False),
        ("tiny", {}, False),
        ("full", {"layers": 31}, False),
        ("full", {"feed_forward_width": 512}, False),
        (None, {"global_batch": 8}, False),
    ],
)
def test_peaks_compare_where_model_and_batch_are_those_of_the_table(scale, changes, is_same):
    space = TABLE.at_scale(scale)
    assert is_of_published_size(space, make_workload("cuda", space.workload, changes)) == is_same
