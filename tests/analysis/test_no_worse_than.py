import dataclasses

import pytest

from autotune.analysis.no_worse_than import find_matches
from autotune.analysis.tolerance import Tolerance
from autotune.errors import InvalidInput
from autotune.spec.config import TrainingConfig
from tests.building.results import MIB, record, study_result

BLOCK = TrainingConfig(checkpointing="block")


def study(*trials, name="study", baseline_speed=1000.0):
    """A study of these trials behind a baseline of 200 MiB and perplexity 10."""
    baseline = record(
        0, memory=200 * MIB, speed=baseline_speed, perplexity=10.0, outcome="over_cap"
    )
    return study_result([baseline, *trials], study=name, baseline=0)


OTHER = TrainingConfig(checkpointing="sqrt")


def found(trial, *others, baseline_speed=1000.0):
    """Returns the match of `trial`, the one trial next to its baseline."""
    other = study(*others, name="other", baseline_speed=baseline_speed)
    return find_matches(study(trial), other, tolerance=Tolerance())[1].found


ROW = record(1, memory=100 * MIB, speed=1000.0, perplexity=10.0, config=BLOCK)


@pytest.mark.parametrize(
    ("changes", "matches"),
    [
        ({}, True),
        ({"memory": 90 * MIB}, True),
        ({"memory": 100 * MIB + 1}, False),
        ({"speed": 980.0}, True),
        ({"speed": 950.0}, False),
        ({"perplexity": 10.04}, True),
        ({"perplexity": 10.06}, False),
        ({"memory": 10 * MIB, "speed": 5000.0, "perplexity": 11.0}, False),
        ({"outcome": "over_cap"}, False),
    ],
)
def test_a_match_is_worse_on_no_objective_by_more_than_its_tolerance(changes, matches):
    candidate = record(
        7, **{"memory": 100 * MIB, "speed": 1000.0, "perplexity": 10.0, "config": OTHER, **changes}
    )
    assert (found(ROW, candidate) is not None) == matches


def test_of_several_the_fastest_is_taken():
    slow, fast = (
        record(number, memory=50 * MIB, speed=1000.0 * number, perplexity=10.0, config=OTHER)
        for number in (2, 3)
    )
    assert found(ROW, slow, fast).number == 3


def test_speeds_are_relative_to_what_both_runs_have_measured():
    twice_as_fast = record(5, memory=100 * MIB, speed=1500.0, perplexity=10.0, config=OTHER)
    assert found(ROW, twice_as_fast, baseline_speed=1000.0) is not None
    assert found(ROW, twice_as_fast, baseline_speed=2000.0) is None


def test_a_trial_over_the_cap_is_matched_too():
    first = study(
        record(1, memory=150 * MIB, speed=900.0, perplexity=10.0, outcome="over_cap", config=BLOCK)
    )
    better = record(4, memory=100 * MIB, speed=1000.0, perplexity=10.0, config=OTHER)
    matches = find_matches(first, study(better, name="other"), tolerance=Tolerance())
    assert [match.found.number for match in matches] == [4, 4]


def itself(*, front, others=()):
    other = dataclasses.replace(study(ROW, *others, name="other"), front=front)
    return find_matches(study(ROW), other, tolerance=Tolerance())[1]


def test_a_trial_is_matched_by_itself_where_the_other_study_has_it_on_its_front():
    match = itself(front=(1,))
    assert (match.found.number, match.found_itself) == (1, True)


def test_a_trial_is_not_matched_by_itself_where_something_beats_it():
    assert itself(front=()).found is None


def test_what_the_other_study_has_measured_too_is_compared_as_it_ran_there():
    """Here the row ran at 1000, there at 500, and something else at 600, which is faster."""
    there = record(1, memory=100 * MIB, speed=500.0, perplexity=10.0, config=BLOCK)
    faster = record(2, memory=100 * MIB, speed=600.0, perplexity=10.0, config=OTHER)
    match = find_matches(study(ROW), study(there, faster, name="other"), tolerance=Tolerance())[1]
    assert (match.found.number, match.speed) == (2, 1.2)


def test_another_configuration_is_preferred_to_itself():
    slower = record(3, memory=90 * MIB, speed=990.0, perplexity=10.0, config=OTHER)
    match = itself(front=(1,), others=[slower])
    assert (match.found.number, match.found_itself) == (3, False)


def test_a_trial_that_was_not_measured_has_no_match():
    unmeasured = record(
        1, memory=None, speed=None, perplexity=None, outcome="crashed", config=BLOCK
    )
    assert [
        match.trial.number
        for match in find_matches(study(unmeasured), study(ROW), tolerance=Tolerance())
    ] == [0]


def test_other_workloads_are_rejected():
    other = study(ROW, name="other")
    deeper = dataclasses.replace(other, workload=dataclasses.replace(other.workload, layers=99))
    with pytest.raises(InvalidInput, match="workloads differ"):
        find_matches(study(ROW), deeper, tolerance=Tolerance())


def test_one_measurement_that_was_disturbed_does_not_decide_how_fast_a_run_was():
    common = [
        record(
            number,
            memory=MIB,
            speed=1000.0,
            perplexity=99.0,
            config=TrainingConfig(micro_batch_size=number),
        )
        for number in (2, 4)
    ]
    disturbed = study(
        *common,
        record(1, memory=90 * MIB, speed=1000.0, perplexity=10.0, config=OTHER),
        baseline_speed=1,
    )
    match = find_matches(study(*common, ROW), disturbed, tolerance=Tolerance())[-1]
    assert (match.found.config, match.speed) == (OTHER, 1.0)


def test_studies_with_nothing_in_common_are_rejected():
    with pytest.raises(InvalidInput, match="'lonely'"):
        find_matches(
            study(ROW),
            study_result([record(1, config=OTHER)], study="lonely"),
            tolerance=Tolerance(),
        )
