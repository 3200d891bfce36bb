"""Confirmed speeds and speeds of trials that ran alone are never compared with each other."""

import itertools
from dataclasses import replace

import pytest

from autotune.analysis.ablation import ablation_steps
from autotune.analysis.front import pareto_front
from autotune.analysis.no_worse_than import find_matches
from autotune.analysis.pick import (
    PREFERENCES,
    Preferences,
    choose,
    contenders,
    savings,
)
from autotune.analysis.tolerance import Tolerance, is_same_speed
from autotune.spec.config import LegalityContext, TrainingConfig
from autotune.spec.result import SpeedAlone
from tests.building.results import MIB, record, study_result

BASELINE = TrainingConfig(micro_batch_size=8)
CONFIGS = (
    BASELINE,
    TrainingConfig(micro_batch_size=8, precision="bf16-mixed"),
    TrainingConfig(micro_batch_size=8, checkpointing="block"),
    TrainingConfig(micro_batch_size=8, precision="bf16-mixed", checkpointing="block"),
)
MEMORY = (100, 80, 60, 40)
ALONE = (1000.0, 1990.0, 900.0, 3067.0)
IN_TURN = (1000.0, 1500.0, 1300.0, 800.0)
SUBSETS = [
    subset
    for size in range(len(CONFIGS) + 1)
    for subset in itertools.combinations(range(len(CONFIGS)), size)
]


def trials(confirmed, *, disturbance=1.0):
    """Returns trials of which some were confirmed, while something slowed all runs in turn down."""
    found = []
    for number, config in enumerate(CONFIGS):
        trial = record(
            number,
            config=config,
            memory=MEMORY[number] * MIB,
            speed=ALONE[number],
            speed_error=0.05,
            seconds=1.0,
        )
        if number in confirmed:
            trial = replace(
                trial,
                alone=SpeedAlone(tokens_per_second=ALONE[number], spread=None, error=0.05),
                tokens_per_second=IN_TURN[number] * disturbance,
                speed_error=0.01,
                confirmations=3,
            )
        found.append(trial)
    return found


def claims_of_front(records):
    return pareto_front(records, tolerance=Tolerance())


def claims_of_pick(records):
    claims = []
    for prefer in PREFERENCES:
        preferences = Preferences(prefer=prefer)
        front = pareto_front(records, tolerance=preferences.tolerance)
        pick = choose(records, front, baseline=records[0], preferences=preferences)
        picked = records[pick.number]
        claims.append((pick, contenders(picked, records, preferences=preferences)))
    return claims


def claims_of_comparisons(records):
    return [
        (savings(one, other), is_same_speed(one, other))
        for one, other in itertools.permutations(records, 2)
    ]


def claims_of_ablation(records):
    steps = ablation_steps(
        records,
        plain=BASELINE,
        pick=records[3],
        predicted_peak=lambda config: None,
        at=LegalityContext(global_batch=8),
    )
    speeds = []
    for step in steps:
        for effect in (step.alone, step.on_top):
            if not isinstance(effect, str):
                speeds += [effect.speed_share, effect.speed_spread or 0.0]
        speeds += [step.pairs.speed_share.lowest, step.pairs.speed_share.highest]
    return [round(speed, 9) for speed in speeds]


def claims_of_other_studies(records):
    front = pareto_front(records, tolerance=Tolerance())
    other = study_result(records, study="other", front=front)
    return [
        (match.trial.number, match.found.number, round(match.speed, 9))
        for match in find_matches(study_result(records), other, tolerance=Tolerance())
        if match.found is not None
    ]


CLAIMS = (
    claims_of_front,
    claims_of_pick,
    claims_of_comparisons,
    claims_of_ablation,
    claims_of_other_studies,
)


@pytest.mark.parametrize("claims", CLAIMS)
@pytest.mark.parametrize("confirmed", SUBSETS)
def test_what_disturbs_all_runs_in_turn_alike_changes_no_claim(claims, confirmed):
    for disturbance in (0.05, 4.0):
        disturbed = trials(confirmed, disturbance=disturbance)
        assert claims(disturbed) == claims(trials(confirmed))


def pick_of(records):
    front = pareto_front(records, tolerance=Tolerance())
    return choose(records, front, baseline=records[0], preferences=Preferences())


def test_an_unconfirmed_speed_does_not_win_over_confirmed_ones_that_were_faster_alone():
    # Trial 3 had 3067 tokens/s alone and has 800 in turn; trial 1 had 1990 alone.
    assert pick_of(trials([0, 3])).number != 1


def test_confirming_slow_trials_does_not_make_them_the_pick():
    assert pick_of(trials([0, 2])).number == 3


def test_a_confirmed_pick_is_compared_with_an_unconfirmed_baseline_as_both_ran_alone():
    text = savings(trials([3])[3], trials([])[0])
    assert "3.07x the speed, each measured alone" in text
