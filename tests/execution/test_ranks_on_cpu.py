"""How many processes of a CPU a trial may have."""

import os

import pytest

from autotune.errors import InvalidInput
from autotune.execution.server_tasks import RANKS_PER_CORE, check_ranks_on_cpu


def test_more_processes_than_the_cores_can_take_turns_with_are_rejected():
    most = RANKS_PER_CORE * len(os.sched_getaffinity(0))
    check_ranks_on_cpu(most)
    with pytest.raises(InvalidInput, match=f"cannot use {most + 1} devices on a CPU"):
        check_ranks_on_cpu(most + 1)
