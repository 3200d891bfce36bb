"""What pages and texts show of a study whose trials use several devices."""

import dataclasses

import pytest

from autotune.reporting.report.details import trial_details
from autotune.reporting.trial_text import (
    about,
    communication_text,
    full_hover,
    peaks_text,
    place_and_cap,
)
from autotune.service.pages.contexts import trial_page
from autotune.spec.reading import parse
from autotune.spec.result import Measurement
from autotune.spec.workload import make_workload
from autotune.study.event_text import opening_lines
from tests.building.results import MIB, record, study_result
from tests.building.studies import definition

PEAKS = (40 * MIB, 30 * MIB)
DIVIDED = record(
    1,
    memory=40 * MIB,
    devices=2,
    peak_memory_bytes_by_rank=PEAKS,
    communication_seconds=0.00701,
    communication_share=0.257,
)
IN_COLLECTIVES = "26 % of a profiled step, 7.01 ms"
WHOLE = record(0, memory=60 * MIB)


@pytest.fixture
def result():
    found = study_result([WHOLE, DIVIDED])
    workload = make_workload("cpu", {"global_batch": 8, "devices_per_trial": 2})
    return dataclasses.replace(found, workload=workload)


def test_the_devices_of_a_trial_are_named_with_their_number(result):
    assert f"on 2 {result.device.type} devices ({result.device.name})" in about(result)
    assert f"2 {result.device.type} devices" in place_and_cap(result)
    assert place_and_cap(result).endswith("each")


def test_the_first_line_of_a_search_says_that_the_cap_is_that_of_each_device(result):
    opened = definition("several", workload=result.workload)
    (line,) = opening_lines(opened, is_new=True, excluded=())
    assert "on each of 2 cpu devices" in line


def test_the_largest_peak_of_a_trial_is_marked_among_those_of_its_devices(result):
    ranks = trial_page(result, 1).ranks
    assert [(peak.text, peak.share, peak.is_largest) for peak in ranks] == [
        ("40.00 MiB", 1.0, True),
        ("30.00 MiB", 0.75, False),
    ]
    assert dict(trial_page(result, 1).measured)["devices"].startswith("2")


def test_a_trial_on_one_device_has_no_ranks(result):
    assert trial_page(result, 0).ranks == ()


def test_the_report_has_the_peaks_of_trials_on_several_devices(result):
    ranks = trial_details(result)["ranks"]
    assert {number: [peak["text"] for peak in peaks] for number, peaks in ranks.items()} == {
        1: ["40.00 MiB", "30.00 MiB"]
    }


def test_a_mark_in_a_picture_says_the_peaks_of_all_devices():
    assert peaks_text(PEAKS) in full_hover(DIVIDED, None).replace("<br>", " ")


def test_the_time_in_collectives_is_in_every_text_about_a_trial(result):
    assert communication_text(DIVIDED) == IN_COLLECTIVES
    assert dict(trial_page(result, 1).measured)["in collectives"] == IN_COLLECTIVES
    assert trial_details(result)["facts"]["in collectives"]["values"] == ["", IN_COLLECTIVES]
    assert IN_COLLECTIVES in full_hover(DIVIDED, None).replace("<br>", " ")


def test_the_time_in_collectives_of_a_trial_on_one_device_is_not_known(result):
    assert communication_text(WHOLE) == ""
    assert "in collectives" not in dict(trial_page(result, 0).measured)


def test_a_second_and_more_in_collectives_is_not_said_in_milliseconds():
    slow = dataclasses.replace(DIVIDED, communication_seconds=2.5)
    assert communication_text(slow) == "26 % of a profiled step, 2.5 s"


def test_a_measurement_from_before_there_were_several_devices_is_of_one():
    older = dataclasses.asdict(Measurement(outcome="ok"))
    del older["devices"], older["peak_memory_bytes_by_rank"]
    del older["communication_seconds"], older["communication_share"]
    read = parse(Measurement, older)
    assert (read.devices, read.peak_memory_bytes_by_rank) == (1, ())
    assert (read.communication_seconds, read.communication_share) == (None, None)
