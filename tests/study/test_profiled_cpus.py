"""A profile of a trial on a CPU has as many of its cores as the trial had."""

import os
from types import SimpleNamespace

import pytest

from autotune.study.profiling import _use_cpus_of
from tests.quick_study.quick_executor import CPU


def cpu(threads):
    return SimpleNamespace(**vars(CPU) | {"name": f"AMD EPYC, {threads} threads"})


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_a_trial_that_had_one_core_is_profiled_on_one_and_one_that_had_all_on_all():
    executor = SimpleNamespace(identify=lambda _: cpu(2), cpus=None)
    _use_cpus_of(executor, cpu(2))
    assert executor.cpus is None
    _use_cpus_of(executor, cpu(1))
    assert executor.cpus == (min(os.sched_getaffinity(0)),)
