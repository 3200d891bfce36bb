"""What is measured after a search: the plan, driven on simulated machines."""

from dataclasses import replace

import pytest

from autotune.analysis.confirmed import confirmed_records
from autotune.analysis.front import pareto_front
from autotune.analysis.pick import DEFAULT_PREFERENCES, PREFERENCES, Preferences, choose
from autotune.spec.config import TrainingConfig
from autotune.spec.confirmation import RepeatedSpeed
from autotune.spec.provenance import MEASURED, TrialReference
from autotune.study.confirmation.plan import (
    MOST_CONFIRMATIONS,
    MOST_FAILURES,
    PICK_CONFIRMATIONS,
    SUBJECTS_AT_ONCE,
    RepeatAlone,
    TimeInTurn,
    TrainSeed,
    _in_order,
    next_step_of,
    next_variants,
    pick_of,
)
from autotune.study.confirmation.session import what_was_left_out
from tests.building.results import MIB, out_of_memory, record
from tests.study.confirmation.simulated import CONFIGS, Machine, typical


def announced(machine, *, prefer="fastest"):
    """Returns the pick as a user is told it, with the speeds that he is shown."""
    preferences = Preferences(prefer=prefer)
    records = confirmed_records(machine.records, machine.confirmations)
    front = pareto_front(records, tolerance=preferences.tolerance)
    pick = choose(records, front, baseline=None, preferences=preferences)
    return next(one for one in records if one.number == pick.number)


def confirmed(machine):
    return {
        one.number: one.confirmations
        for one in confirmed_records(machine.records, machine.confirmations)
    }


def two(*, fast=2000.0, **options):
    """Returns a machine with the baseline and one trial that is smaller and faster."""
    return Machine([(CONFIGS[0], 200, 1000.0, 10.0), (CONFIGS[1], 100, fast, 10.0)], **options)


# -- it ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefer", PREFERENCES)
@pytest.mark.parametrize("seed", range(4))
def test_a_plan_ends_with_the_announced_pick_confirmed_three_times(prefer, seed):
    machine = typical(seed=seed).confirm(prefer=prefer)
    assert announced(machine, prefer=prefer).confirmations >= PICK_CONFIRMATIONS


@pytest.mark.parametrize("prefer", PREFERENCES)
def test_no_trial_is_measured_without_end_however_equal_all_are(prefer):
    trials = [(config, 400 - index, 1000.0, 10.0) for index, config in enumerate(CONFIGS)]
    machine = Machine(trials, in_turn=0.2).confirm(prefer=prefer)
    assert max(confirmed(machine)[number] for number in range(1, len(trials))) <= (
        2 * MOST_CONFIRMATIONS
    )


def test_a_plan_ends_on_a_machine_without_any_noise():
    assert typical(alone=0.0, in_turn=0.0).confirm().next_step() is None


def test_without_a_feasible_trial_nothing_is_measured():
    machine = two()
    machine.records = [out_of_memory(number, config=CONFIGS[number]) for number in range(2)]
    assert machine.next_step() is None


def test_the_only_feasible_trial_is_repeated_alone():
    machine = Machine([(CONFIGS[0], 100, 1000.0, 10.0)])
    for _ in range(PICK_CONFIRMATIONS):
        step = machine.next_step()
        assert isinstance(step, RepeatAlone)
        machine.confirmations.append(
            RepeatedSpeed(config=step.record.config, tokens_per_second=1000.0, seconds=1.0)
        )
    assert machine.next_step() is None


# -- the order -------------------------------------------------------------------------------------


def test_the_pick_is_measured_first_and_with_every_member_of_the_front():
    machine = typical(alone=0.001, in_turn=0.001).confirm()
    front = pareto_front(machine.records, tolerance=DEFAULT_PREFERENCES.tolerance)
    pick = choose(machine.records, front, baseline=None, preferences=DEFAULT_PREFERENCES)
    runs = machine.subjects()[:PICK_CONFIRMATIONS]
    assert [run[0] for run in runs] == [pick.number] * PICK_CONFIRMATIONS
    assert {number for run in runs for number in run} >= set(front) - {0}


def test_a_run_has_the_partner_and_at_most_three_others_each_once():
    machine = typical().confirm()
    for run in machine.runs:
        numbers = [subject.number for subject in run.subjects]
        assert 1 <= len(numbers) <= SUBJECTS_AT_ONCE
        assert len({*numbers, run.partner.number}) == len(numbers) + 1


def test_the_partner_is_the_baseline_where_it_is_feasible():
    assert {run.partner.number for run in typical().confirm().runs} == {0}


def test_the_partner_is_the_smallest_of_the_front_where_the_baseline_is_over_the_cap():
    machine = typical(alone=0.001, in_turn=0.001)
    machine.change(0, feasible=False, outcome="over_cap")
    machine.confirm()
    assert {run.partner.number for run in machine.runs} == {len(machine.records) - 1}


def test_a_baseline_that_is_far_slower_than_the_fastest_is_no_partner_as_fp32_on_a_gpu():
    machine = typical(alone=0.001, in_turn=0.001)
    machine.change(0, tokens_per_second=100.0)
    machine.confirm()
    assert 0 not in {run.partner.number for run in machine.runs}


def test_a_baseline_over_the_cap_is_measured_once_with_the_pick():
    machine = typical()
    machine.change(0, feasible=False, outcome="over_cap")
    machine.confirm()
    assert [subject.number for subject in machine.runs[0].subjects][1] == 0
    assert confirmed(machine)[0] == 1


def test_a_partner_is_kept_when_a_smaller_trial_comes():
    machine = typical(alone=0.001, in_turn=0.001)
    machine.change(0, feasible=False, outcome="over_cap")
    machine.confirm(most_steps=1)
    kept = machine.steps[0].partner.number
    config = TrainingConfig(micro_batch_size=64, precision="bf16-true")
    machine.true_speed[config] = 500.0
    machine.records.append(
        record(len(machine.records), config=config, memory=10 * MIB, speed=500.0)
    )
    machine.confirm()
    assert {run.partner.number for run in machine.runs} == {kept}


def test_where_the_baseline_is_the_pick_it_is_measured_with_another_trial():
    machine = two(fast=100.0)
    machine.confirm()
    assert announced(machine).number == 0
    assert confirmed(machine)[0] >= PICK_CONFIRMATIONS


def test_a_dominated_trial_is_measured_where_nothing_else_can_confirm_the_baseline():
    trials = [(CONFIGS[0], 100, 1000.0, 10.0), (CONFIGS[1], 200, 500.0, 10.0)]
    machine = Machine(trials, alone=0.001, in_turn=0.001).confirm()
    assert confirmed(machine)[0] >= PICK_CONFIRMATIONS


# -- racing ----------------------------------------------------------------------------------------


def test_a_trial_that_is_certainly_slower_is_measured_once():
    machine = Machine(
        [
            (CONFIGS[0], 400, 1000.0, 10.0),
            (CONFIGS[1], 300, 2000.0, 10.0),
            (CONFIGS[2], 200, 1000.0, 10.0),
        ],
        alone=0.02,
        in_turn=0.02,
    ).confirm()
    assert confirmed(machine)[1] > 1
    assert confirmed(machine)[2] == 1


def test_two_trials_that_may_be_equal_are_measured_until_a_difference_does_not_matter():
    machine = Machine(
        [
            (CONFIGS[0], 400, 500.0, 10.0),
            (CONFIGS[1], 300, 1050.0, 10.0),
            (CONFIGS[2], 200, 1000.0, 10.0),
        ]
    ).confirm()
    assert min(confirmed(machine)[1], confirmed(machine)[2]) >= PICK_CONFIRMATIONS


def test_the_smallest_is_picked_without_a_race_for_speed():
    trials = [(CONFIGS[index], 400 - 50 * index, 1000.0, 10.0) for index in range(4)]
    machine = Machine(trials, in_turn=0.05).confirm(prefer="smallest")
    assert all(
        confirmed(machine)[number] <= 1 for number in (1, 2) if number != announced(machine).number
    )


def test_for_balance_a_much_faster_trial_that_needs_much_more_is_no_rival():
    machine = Machine(
        [
            (CONFIGS[0], 1000, 500.0, 10.0),
            (CONFIGS[1], 800, 2000.0, 10.0),
            (CONFIGS[2], 50, 1000.0, 10.0),
        ],
        alone=0.02,
        in_turn=0.02,
    ).confirm(prefer="balanced")
    assert announced(machine, prefer="balanced").number == 2
    assert confirmed(machine)[1] == 1


def test_a_lucky_trial_loses_its_place_to_the_one_that_is_faster():
    trials = [
        (CONFIGS[0], 400, 1000.0, 10.0),
        (CONFIGS[1], 300, 1400.0, 10.0),
        (CONFIGS[2], 300, 1200.0, 10.0),
    ]
    machine = Machine(trials, alone=0.08)
    machine.change(1, tokens_per_second=1250.0)
    machine.change(2, tokens_per_second=1350.0)
    machine.confirm()
    assert announced(machine).number == 1


def test_a_trial_that_bad_luck_may_have_kept_off_the_front_is_measured():
    machine = Machine(
        [
            (CONFIGS[0], 200, 500.0, 10.0),
            (CONFIGS[1], 100, 1000.0, 10.0),
            (CONFIGS[2], 101, 1010.0, 10.0),
            (CONFIGS[3], 101, 500.0, 10.0),
        ],
        alone=0.001,
        in_turn=0.001,
    ).confirm()
    assert confirmed(machine)[2] == 1
    assert confirmed(machine)[3] == 0


# -- failures --------------------------------------------------------------------------------------


def test_what_fails_in_turn_is_not_tried_for_ever():
    machine = typical(alone=0.001, in_turn=0.001)
    pick = machine.next_step().subjects[0].number
    machine.failing = {machine.records[pick].config}
    machine.confirm()
    assert sum(pick in run for run in machine.subjects()) == MOST_FAILURES


def test_where_everything_fails_in_turn_the_plan_ends():
    machine = typical()
    machine.failing = set(CONFIGS)
    machine.confirm()
    assert all(
        sum(number in run for run in machine.subjects()) <= MOST_FAILURES
        for number in range(len(machine.records))
    )


def test_a_partner_that_fails_in_turn_is_replaced():
    machine = typical()
    machine.failing = {machine.baseline}
    machine.confirm()
    assert machine.runs[0].partner.number == 0
    assert announced(machine).confirmations >= PICK_CONFIRMATIONS


# -- reused trials ---------------------------------------------------------------------------------


def test_trials_of_an_earlier_study_are_measured_today():
    machine = typical()
    for number in range(len(machine.records)):
        machine.change(number, reused_from=TrialReference(number=number, study="a"), seconds=None)
    machine.confirm()
    assert announced(machine).confirmations >= PICK_CONFIRMATIONS


# -- seeds -----------------------------------------------------------------------------------------


def mixed():
    """Returns a machine whose fastest trial trains in 16 bit."""
    half = TrainingConfig(micro_batch_size=64, precision="bf16-true")
    machine = Machine(
        [(CONFIGS[0], 400, 1000.0, 10.0), (half, 200, 2000.0, 10.01)], alone=0.02, in_turn=0.02
    )
    for number in range(2):
        machine.change(number, perplexity_source=MEASURED)
    return machine


def test_a_class_in_16_bit_that_competes_is_trained_with_both_further_seeds_and_so_is_its_rival():
    machine = mixed()
    machine.change(0, peak_memory_bytes=100 * MIB)
    machine.confirm(seeds=(8, 9))
    trained = [(step.record.number, step.seed) for step in machine.steps if type(step) is TrainSeed]
    assert sorted(trained) == [(0, 8), (0, 9), (1, 8), (1, 9)]


@pytest.mark.parametrize(
    ("seconds_of_reference", "in_order"),
    [
        pytest.param(3.0, [(0, 8), (1, 8), (0, 9), (1, 9)], id="about as fast"),
        pytest.param(20.0, [(1, 8), (1, 9), (0, 8), (0, 9)], id="far slower, as fp32 on a GPU"),
    ],
)
def test_a_reference_that_takes_far_longer_is_trained_with_the_seeds_after_all_others(
    seconds_of_reference, in_order
):
    reference, other = (
        replace(record(number), seconds=seconds)
        for number, seconds in ((0, seconds_of_reference), (1, 2.5))
    )
    found = [(one.number, seed) for one, seed in _in_order([reference, other], (8, 9))]
    assert found == in_order


def test_seeds_come_first_where_one_of_them_keeps_a_much_faster_trial_from_being_the_pick():
    machine = mixed()
    machine.change(0, peak_memory_bytes=100 * MIB)
    machine.change(1, perplexity=10.4)
    machine.confirm(seeds=(8, 9))
    assert [isinstance(step, TrainSeed) for step in machine.steps[:2]] == [True, True]


def test_seeds_come_after_the_pick_is_confirmed():
    machine = mixed()
    machine.change(0, peak_memory_bytes=100 * MIB)
    machine.confirm(seeds=(8, 9))
    first_seed = next(i for i, step in enumerate(machine.steps) if isinstance(step, TrainSeed))
    assert sum(isinstance(step, TimeInTurn) for step in machine.steps[:first_seed]) >= (
        PICK_CONFIRMATIONS
    )


def trained_with_seeds(machine, *, prefer="fastest"):
    machine.confirm(seeds=(8, 9), prefer=prefer)
    return {step.record.number for step in machine.steps if isinstance(step, TrainSeed)}


def three_classes(*, speed_of_third, noise=0.02):
    """Returns a machine whose pick is in 16 bit, and a smaller trial of another class in 16 bit."""
    trials = [
        (CONFIGS[0], 400, 1000.0, 10.0),
        (TrainingConfig(micro_batch_size=64, precision="bf16-mixed"), 300, 2000.0, 10.01),
        (TrainingConfig(micro_batch_size=64, precision="bf16-true"), 200, speed_of_third, 10.02),
    ]
    machine = Machine(trials, alone=noise, in_turn=noise)
    for number in range(3):
        machine.change(number, perplexity_source=MEASURED)
    return machine


def test_a_class_in_16_bit_that_is_far_slower_than_the_pick_gets_no_seeds():
    assert trained_with_seeds(three_classes(speed_of_third=1300.0)) == {0, 1}


def test_a_class_in_16_bit_that_may_be_as_fast_as_the_pick_gets_seeds():
    assert trained_with_seeds(three_classes(speed_of_third=1900.0, noise=0.05)) == {0, 1, 2}


def test_a_class_in_16_bit_that_is_slower_but_the_better_balance_gets_seeds():
    machine = three_classes(speed_of_third=1500.0)
    assert 2 in trained_with_seeds(machine, prefer="balanced")


def test_a_faster_class_whose_one_training_was_too_bad_gets_seeds():
    machine = three_classes(speed_of_third=1300.0)
    machine.change(1, perplexity=10.2)
    assert 1 in trained_with_seeds(machine)


def test_where_every_class_has_its_seeds_none_is_trained_again():
    machine = mixed()
    machine.change(0, peak_memory_bytes=100 * MIB)
    machine.confirm(seeds=())
    assert not any(isinstance(step, TrainSeed) for step in machine.steps)


# -- one trial, and variants -----------------------------------------------------------------------


def one(machine, number, **options):
    return next_step_of(
        number,
        machine.records,
        machine.confirmations,
        baseline=machine.baseline,
        preferences=DEFAULT_PREFERENCES,
        **options,
    )


@pytest.mark.parametrize("number", [0, 3])
def test_one_trial_is_measured_until_it_has_three_confirmations_also_the_baseline(number):
    machine = typical()
    while step := one(machine, number):
        machine.do(step)
    assert confirmed(machine)[number] == PICK_CONFIRMATIONS
    assert len(machine.runs) == PICK_CONFIRMATIONS


def test_one_trial_that_fails_in_turn_is_tried_twice():
    machine = typical()
    machine.failing = {machine.records[3].config}
    while step := one(machine, 3):
        machine.do(step)
    assert len(machine.runs) == MOST_FAILURES


def test_the_pick_whose_techniques_are_taken_away_is_the_announced_one():
    for seed in range(6):
        machine = typical(seed=seed).confirm(most_steps=4)
        picked = pick_of(
            machine.records,
            machine.confirmations,
            baseline=machine.baseline,
            preferences=DEFAULT_PREFERENCES,
        )
        assert picked.number == announced(machine).number


def test_variants_are_measured_in_turn_once_and_only_those_that_trained():
    machine = two()
    trained, failed = CONFIGS[2], CONFIGS[3]
    machine.true_speed[trained] = 1500.0
    variants = [
        record(-1, config=trained, feasible=False),
        out_of_memory(-1, config=failed),
    ]

    def next_run():
        return next_variants(
            [*machine.records, *variants],
            machine.confirmations,
            variants={trained, failed},
            baseline=machine.baseline,
            preferences=DEFAULT_PREFERENCES,
        )

    run = next_run()
    assert [subject.config for subject in run.subjects] == [trained]
    machine.do(run)
    assert next_run() is None


@pytest.mark.parametrize(
    ("techniques", "are_compared", "sentence"),
    [
        (
            ["compile", "loss"],
            False,
            "not measured: the pick without compile, loss; not measured in turn with it: the pick "
            "without its other techniques",
        ),
        (["compile"], True, "not measured: the pick without compile"),
        ([], False, "not measured in turn with it: the pick without some of its techniques"),
    ],
)
def test_a_note_says_which_variants_there_was_no_time_for(techniques, are_compared, sentence):
    assert what_was_left_out(techniques, are_compared=are_compared) == sentence
