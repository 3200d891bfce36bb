import pytest

from autotune.analysis.published_comparison import (
    StudyRow,
    compare_with_published,
    is_of_published_size,
    reference_of,
    rows_of_study,
)
from autotune.errors import InvalidInput
from autotune.spec.config import TrainingConfig
from autotune.spec.published_table import Figures, Reference
from autotune.spec.space_file import load_space
from autotune.spec.workload import make_workload
from tests.building.results import GIB, record
from tests.building.studies import definition

REFERENCE = Reference(
    source="a paper",
    measured_on="one GPU",
    control="plain",
    rows={
        "plain": Figures(peak_memory_bytes=20 * GIB, tokens_per_second=1000.0, perplexity=12.0),
        "fused": Figures(peak_memory_bytes=5 * GIB, tokens_per_second=1500.0, perplexity=13.0),
    },
)
OWN = {
    "plain": StudyRow(figures=Figures(peak_memory_bytes=10 * GIB, tokens_per_second=100.0)),
    "fused": StudyRow(figures=Figures(peak_memory_bytes=4 * GIB, tokens_per_second=200.0)),
}


def rows(own=OWN, *, has_published_size=True):
    return {
        row.name: row
        for row in compare_with_published(
            REFERENCE, own.__getitem__, has_published_size=has_published_size
        )
    }


def test_savings_are_relative_to_the_control_of_the_same_table():
    assert (rows()["fused"].saved, rows()["fused"].published_saved) == pytest.approx((0.6, 0.75))


def test_the_difference_of_savings_is_the_users_less_the_published():
    assert rows()["fused"].saved_difference == pytest.approx(-0.15)


def test_speeds_are_relative_to_the_control_of_the_same_table():
    assert (rows()["fused"].speed, rows()["fused"].published_speed) == pytest.approx((2.0, 1.5))


def test_the_control_is_the_unit_of_everything():
    control = rows()["plain"]
    assert (control.saved, control.speed, control.published_saved, control.published_speed) == (
        0,
        1,
        0,
        1,
    )


def test_peaks_of_the_same_size_have_a_ratio():
    assert rows()["fused"].peak_ratio == pytest.approx(0.8)


def test_peaks_of_another_size_have_none():
    assert rows(has_published_size=False)["fused"].peak_ratio is None


def test_without_a_control_nothing_is_relative_to_it():
    row = rows({**OWN, "plain": StudyRow()})["fused"]
    assert (row.saved, row.speed, row.saved_difference, row.speed_ratio) == (None, None, None, None)
    assert row.published_saved == pytest.approx(0.75)


def test_a_row_that_was_not_trained_has_no_speed():
    row = rows(
        {**OWN, "fused": StudyRow(figures=Figures(peak_memory_bytes=GIB), peak_is_predicted=True)}
    )["fused"]
    assert (row.saved, row.speed) == (pytest.approx(0.9), None)


# -- rows of a study -------------------------------------------------------------------------------

TABLE = load_space("peak_memory")
STUDY = definition(space=TABLE, workload=make_workload("cpu", {"global_batch": 4, "layers": 2}))
FUSED = TrainingConfig(
    optimizer="adafactor-fixed-rate", optimizer_fusion="backward", micro_batch_size=4
)


def own_row(name, *records):
    return rows_of_study(STUDY, {one.config.fingerprint: one for one in records})(name)


def test_a_row_is_found_by_its_configuration_whatever_the_trial_is_called():
    row = own_row(
        "fused",
        record(3, memory=7 * GIB, speed=5.0, perplexity=9.0, config=FUSED, name="another name"),
    )
    assert (row.trial, row.figures) == (
        3,
        Figures(peak_memory_bytes=7 * GIB, tokens_per_second=5.0, perplexity=9.0),
    )


def test_a_peak_that_was_not_measured_is_the_predicted_one_and_says_so():
    trial = record(
        3,
        memory=None,
        speed=None,
        perplexity=None,
        outcome="predicted_over_cap",
        config=FUSED,
        predicted_peak_memory_bytes=9 * GIB,
    )
    row = own_row("fused", trial)
    assert (row.figures.peak_memory_bytes, row.peak_is_predicted, row.remark) == (
        9 * GIB,
        True,
        "predicted over cap",
    )


def test_what_a_training_held_when_it_ran_out_of_memory_is_no_peak():
    trial = record(
        3,
        memory=2 * GIB,
        speed=None,
        perplexity=None,
        outcome="out_of_memory",
        config=FUSED,
        predicted_peak_memory_bytes=9 * GIB,
    )
    row = own_row("fused", trial)
    assert (row.figures.peak_memory_bytes, row.peak_is_predicted, row.remark) == (
        9 * GIB,
        True,
        "out of memory",
    )


def test_without_a_prediction_the_peak_of_what_ran_out_of_memory_is_not_known():
    trial = record(
        3, memory=2 * GIB, speed=None, perplexity=None, outcome="out_of_memory", config=FUSED
    )
    row = own_row("fused", trial)
    assert (row.figures.peak_memory_bytes, row.peak_is_predicted) == (None, False)


def test_a_row_that_was_not_tried_says_so():
    assert own_row("fused").remark == "not tried"


def test_a_row_that_does_not_work_here_says_so():
    study = definition(
        space=TABLE, workload=STUDY.workload, unavailable={"compile": {"model": "no compiler"}}
    )
    assert rows_of_study(study, {})("compile").remark == "cannot be trained here"


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


def test_a_space_without_a_table_is_rejected():
    with pytest.raises(InvalidInput, match="'quick'"):
        reference_of(load_space("quick"), what="study 'x'")
