"""The stated bounds of a prediction against both halves of the committed study."""

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.predictor.accuracy import (
    ASSUMED_ON_CUDA,
    MEASURED_ON_CPU,
    PredictionError,
    error_of,
    group_of,
    is_measured_on_cuda,
)
from autotune.spec.config import TrainingConfig
from autotune.spec.workload import make_workload
from studies.compressed import read_json

STUDY = Path(__file__).parents[2] / "studies" / "predictor_accuracy"
NEW_MODELS = STUDY.parent / "new_models"
ON_A_GPU = STUDY.parent / "gpu" / "h200" / "compared.json.xz"
EXCEPTIONS = {"longcat_flash"}


def pairs_in(name) -> list[dict]:
    rows = read_json(STUDY / name)["pairs"]
    return [row for row in rows if row["predicted_bytes"] and row["measured_bytes"]]


PAIRS, PAIRS_WITH_ADAPTERS = pairs_in("results.json.xz"), pairs_in("adapters.json.xz")
HALVES = ("calibration", "held out")


def is_outside(row) -> bool:
    error = error_of(TrainingConfig(**row["config"]), device="cpu")
    predicted, measured = row["predicted_bytes"], row["measured_bytes"]
    return not error.lower_bound(predicted) <= measured <= error.upper_bound(predicted)


@pytest.mark.parametrize("half", HALVES)
def test_no_measured_peak_of_the_study_is_outside_its_bounds(half):
    assert [row for row in PAIRS if row["half"] == half and is_outside(row)] == []


def test_bounds_lie_as_far_below_a_peak_as_above_it():
    error = PredictionError(share=0.02, size_bytes=100)
    assert (error.lower_bound(10_000), error.upper_bound(10_000)) == (9_700, 10_300)
    assert error.lower_bound(50) == 0


def test_no_measured_peak_of_new_models_is_outside_its_bounds():
    """But of the types that the README of the study explains."""
    rows = read_json(NEW_MODELS / "results.json.xz")["pairs"]
    compared = [row for row in rows if row["predicted_bytes"] and row["measured_bytes"]]
    assert len(compared) >= 50
    outside = {row["model"] for row in compared if not is_within(row)}
    assert outside <= EXCEPTIONS


def is_within(row) -> bool:
    least, most = row["bounds_bytes"]
    return least <= row["measured_bytes"] <= most


@pytest.mark.parametrize("group", MEASURED_ON_CPU)
def test_bounds_of_a_model_of_4_mib_are_relative(group):
    error = MEASURED_ON_CPU[group]
    assert error.size_bytes <= 0.01 * 4 * 1024**2


def test_no_measured_peak_with_adapters_is_more_than_one_percent_from_its_prediction():
    ratios = [row["predicted_bytes"] / row["measured_bytes"] for row in PAIRS_WITH_ADAPTERS]
    assert len(ratios) >= 50
    assert max(abs(ratio - 1) for ratio in ratios) <= 0.01


def test_no_rank_of_several_devices_is_more_than_half_a_percent_from_its_prediction():
    cells = read_json(STUDY / "devices.json.xz")["cells"]
    compared = [cell for cell in cells if "measured_bytes_by_rank" in cell]
    assert {cell["ranks"] for cell in compared} == {2, 4}
    for cell in compared:
        predicted, measured = cell["predicted_bytes_by_rank"], cell["measured_bytes_by_rank"]
        assert len(measured) == cell["ranks"]
        assert measured == pytest.approx(predicted, rel=0.005)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("group", MEASURED_ON_CPU)
def test_every_bound_is_based_on_pairs_of_both_halves(half, group):
    assert (
        sum(
            row["half"] == half and group_of(TrainingConfig(**row["config"])) == group
            for row in PAIRS
        )
        >= 4
    )


@pytest.mark.parametrize("group", MEASURED_ON_CPU)
def test_what_was_not_measured_has_wider_bounds(group):
    measured = MEASURED_ON_CPU[group]
    assert (ASSUMED_ON_CUDA.share, ASSUMED_ON_CUDA.size_bytes) > (
        measured.share,
        measured.size_bytes,
    )


# -- on a GPU --------------------------------------------------------------------------------------


def test_no_peak_that_was_measured_on_a_gpu_is_outside_its_bounds():
    pairs = read_json(ON_A_GPU)["pairs"]
    assert len(pairs) >= 80
    assert {pair["device"] for pair in pairs} == {"NVIDIA H200"}
    for pair in pairs:
        error = error_of(TrainingConfig(**pair["config"]), device="cuda", is_measured=True)
        predicted = pair["predicted_bytes"]
        least, most = error.lower_bound(predicted), error.upper_bound(predicted)
        assert least <= pair["measured_bytes"] <= most, pair["name"]


@pytest.mark.parametrize(
    ("settings", "capability", "is_measured"),
    [
        ({}, "9.0", True),
        ({"model": "deep-one"}, "9.0", True),
        ({}, "8.9", False),
        ({}, None, False),
        ({"devices_per_trial": 2}, "9.0", False),
    ],
)
def test_bounds_of_a_gpu_are_measured_for_what_was_measured(settings, capability, is_measured):
    workload = replace(make_workload("cuda", {}), **settings)
    assert is_measured_on_cuda(workload, capability) is is_measured


def test_bounds_of_a_gpu_that_was_not_measured_are_assumed_whatever_the_configuration():
    assert {
        error_of(TrainingConfig(compile=scope), device="cuda") for scope in ("none", "model")
    } == {ASSUMED_ON_CUDA}
