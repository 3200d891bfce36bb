"""How long a process is in collectives, from a profile."""

import pytest

from autotune.memory.communication import (
    Communication,
    communication_on_cpu,
    communication_on_cuda,
    covered,
)


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0),
        ([(0, 5)], 5),
        ([(10, 12), (0, 5)], 7),
        ([(0, 5), (3, 8)], 8),
        ([(0, 9), (3, 5), (8, 10)], 10),
    ],
    ids=["none", "one", "apart", "overlapping", "inside"],
)
def test_collectives_at_the_same_time_count_once(intervals, length):
    assert covered(intervals) == length


def test_a_process_without_collectives_has_no_figure():
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    with (
        profile(activities=[ProfilerActivity.CPU]) as recording,
        record_function("steps"),
    ):
        torch.ones(3).sum()
    assert communication_on_cpu(recording, within="steps") is None
    assert communication_on_cuda(recording, seconds=1.0) is None


def test_the_seconds_of_several_steps_are_divided_and_their_share_is_not():
    found = Communication(seconds=3.0, share=0.5).of_one_step(steps=2)
    assert found == Communication(seconds=1.5, share=0.5)
