"""Plans of what blocks keep: within the room of every moment, and as fast as any that fits."""

import itertools
import random
from dataclasses import replace

import pytest

from autotune.analysis.activation_budget import (
    BlockOperator,
    BlockPart,
    BlockTrace,
    Moment,
    plan_activations,
)


def trace(*operators, choosing=0.0, passes=1):
    """Returns the trace of a block of (bytes, seconds) of operators that autograd saves."""
    return BlockTrace(
        operators=tuple(
            BlockOperator(
                name="aten.mm",
                number=number,
                size_bytes=size,
                seconds=seconds,
                can_be_kept=True,
            )
            for number, (size, seconds) in enumerate(operators)
        ),
        saved_bytes=sum(size for size, _ in operators),
        seconds_of_choosing=choosing,
        passes=passes,
    )


def backward_of(blocks, *, least):
    """Returns the moments of a backward pass whose blocks each need `least` bytes."""
    return [Moment(size_bytes=least, blocks=number) for number in range(blocks + 1)]


BLOCK = trace((40, 4.0), (30, 1.0), (20, 2.5), (10, 0.1))


def kept_bytes(plan):
    return sum(choice.kept_bytes for choice in plan.choices)


def test_everything_is_kept_where_it_fits():
    plan = plan_activations([BLOCK] * 2, backward_of(2, least=50), budget_bytes=250)
    assert plan.kept == (None, None)
    assert plan.seconds == 0.0


def test_nothing_is_planned_below_what_recomputation_needs():
    assert plan_activations([BLOCK] * 2, backward_of(2, least=50), budget_bytes=49) is None


@pytest.mark.parametrize("budget", range(50, 350, 7))
def test_what_is_kept_is_within_the_budget(budget):
    plan = plan_activations([BLOCK] * 3, backward_of(3, least=50), budget_bytes=budget)
    assert 50 + kept_bytes(plan) <= budget


@pytest.mark.parametrize("seed", range(12))
def test_no_other_plan_within_the_room_of_each_moment_is_faster(seed):
    chance = random.Random(seed)
    blocks = [
        trace(*((chance.randint(1, 9), chance.randint(1, 9)) for _ in range(3)), choosing=0.5)
        for _ in range(3)
    ]
    # The gradients of later blocks are there when earlier ones are recomputed.
    moments = [Moment(size_bytes=10 - 2 * number, blocks=number) for number in range(4)]
    budget = chance.randint(15, 40)
    options = []
    for block in blocks:
        subsets = itertools.product((False, True), repeat=3)
        of_block = [(block.saved_bytes, 0.0)]
        for subset in subsets:
            pairs = list(zip(block.operators, subset, strict=True))
            size = sum(one.size_bytes for one, is_kept in pairs if is_kept)
            seconds = sum(one.seconds for one, is_kept in pairs if not is_kept)
            of_block.append((size, seconds + (0.5 if any(subset) else 0.0)))
        options.append(of_block)
    best = min(
        sum(seconds for _, seconds in chosen)
        for chosen in itertools.product(*options)
        if all(
            one.size_bytes + sum(size for size, _ in chosen[: one.blocks]) <= budget
            for one in moments
        )
    )
    plan = plan_activations(blocks, moments, budget_bytes=budget)
    assert plan.seconds == pytest.approx(best)


def test_passes_that_wait_together_count_each():
    twice = trace((40, 4.0), passes=2)
    moments = [Moment(size_bytes=0, blocks=number) for number in range(2)]
    assert plan_activations([twice], moments, budget_bytes=79).kept == (frozenset(),)
    assert plan_activations([twice], moments, budget_bytes=80).kept == (None,)


def test_what_cannot_stand_in_for_another_run_is_not_kept():
    operators = [
        BlockOperator(
            name="aten.native_dropout",
            number=0,
            size_bytes=10,
            seconds=1.0,
            can_be_kept=False,
        )
    ]
    block = BlockTrace(operators=tuple(operators), saved_bytes=20, seconds_of_choosing=0.0)
    plan = plan_activations([block], backward_of(1, least=5), budget_bytes=20)
    assert plan.kept == (frozenset(),)


def test_a_part_is_recomputed_whole_where_choosing_by_operator_takes_longer():
    part = BlockPart(name="attention", size_bytes=50, seconds=2.0)
    block = replace(trace((50, 2.0), (50, 2.0), choosing=3.0), parts=(part,))
    plan = plan_activations([block], backward_of(1, least=5), budget_bytes=60)
    assert plan.kept == (("attention",),)


def test_a_plan_is_the_same_each_time():
    blocks, moments = [BLOCK] * 8, backward_of(8, least=50)
    plans = {plan_activations(blocks, moments, budget_bytes=430).kept for _ in range(3)}
    assert len(plans) == 1
