"""How `autotune predict` prints the peaks of the devices of one trial."""

import dataclasses

import pytest

from autotune.cli.predictions import peaks_by_rank
from tests.building.views import MIB, predicted


def predicted_on(*peaks_bytes, distinct=1):
    return dataclasses.replace(
        predicted(peak=max(peaks_bytes)),
        devices=len(peaks_bytes),
        peak_memory_bytes_by_rank=peaks_bytes,
        distinct_ranks=distinct,
    )


def test_one_device_has_no_ranks():
    assert peaks_by_rank(predicted_on(5 * MIB)) == ""


def test_ranks_that_are_alike_are_one_sentence():
    text = peaks_by_rank(predicted_on(5 * MIB, 5 * MIB, distinct=1))
    assert text == "The same on all 2 ranks. 1 rank was predicted: the others hold as much."


@pytest.mark.parametrize(
    ("peaks", "said"),
    [
        ((9, 9, 5), "By rank: 9.00 MiB on ranks 0-1; 5.00 MiB on rank 2."),
        ((5, 9, 5, 5), "By rank: 9.00 MiB on rank 1; 5.00 MiB on ranks 0, 2-3."),
        ((4, 3, 9, 2, 1), "From most to least: 9.00 MiB on rank 2; 1.00 MiB on rank 4."),
    ],
)
def test_peaks_that_differ_are_listed_with_their_ranks(peaks, said):
    prediction = predicted_on(*(peak * MIB for peak in peaks), distinct=len(peaks))
    assert peaks_by_rank(prediction) == f"{said} Each rank was predicted."
