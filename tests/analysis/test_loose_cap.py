"""A cap that rules nothing out is said to, with one that binds."""

import pytest

from autotune.analysis.loose_cap import loose_cap_sentence
from autotune.units import parse_size
from tests.building.results import GIB, MIB, record


def suggested(sentence):
    return parse_size(sentence.partition("--max-mem ")[2].partition(",")[0])


def test_a_loose_cap_is_answered_with_one_that_binds():
    sentence = loose_cap_sentence(record(0, memory=88 * MIB), cap_bytes=8 * GIB)
    assert sentence.startswith("the cap of 8.00 GiB rules nothing out")
    assert "88.00 MiB" in sentence
    assert "--max-mem 44MiB" in sentence


@pytest.mark.parametrize("cap_bytes", [48 * MIB, 88 * MIB, 160 * MIB])
def test_a_cap_near_what_plain_training_needs_is_not_mentioned(cap_bytes):
    assert loose_cap_sentence(record(0, memory=88 * MIB), cap_bytes=cap_bytes) == ""


def test_nothing_is_said_of_a_cap_before_plain_training_was_measured():
    failed = record(0, outcome="crashed", memory=None)
    assert loose_cap_sentence(None, cap_bytes=8 * GIB) == ""
    assert loose_cap_sentence(failed, cap_bytes=8 * GIB) == ""


def test_a_context_that_no_technique_saves_is_in_the_suggested_cap():
    baseline = record(0, memory=100 * MIB, device_bytes=600 * MIB)
    assert 550 * MIB <= suggested(loose_cap_sentence(baseline, cap_bytes=8 * GIB)) < 600 * MIB


def test_a_trial_that_was_measured_fits_the_suggested_cap():
    baseline = record(0, memory=8 * MIB)
    trials = [baseline, record(1, memory=5 * MIB), record(2, memory=2 * MIB, outcome="crashed")]
    sentence = loose_cap_sentence(baseline, cap_bytes=8 * GIB, records=trials)
    assert 5 * MIB <= suggested(sentence) < 6 * MIB
