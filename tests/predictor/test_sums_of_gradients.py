"""Sums of gradients, which autograd computes in place or not: on fake tensors as on real ones."""

import pytest
import torch
import torch.nn.functional as F

from autotune.memory.attribution import find_peak
from autotune.predictor.fake_mode import StorageWatch
from autotune.shipped.cpu_peak import peak_of

SIZE, ROWS = 64, 16
USES = 4


def uses_of_a_weight(weight, others):
    """The gradients are views, of which none is added to in place; their sums are."""
    return torch.stack([F.linear(other, weight).sin().sum() for other in others])


def uses_of_an_activation(weight, others):
    hidden = weight.neg()
    return torch.stack([hidden.neg().sum() for _ in others])


def sums_with_others(weight, others):
    """Each gradient is that of two tensors, of which none may change it."""
    hidden = weight.neg()
    return torch.stack([(hidden[:ROWS] + other).sin().sum() for other in others])


COMPUTATIONS = (
    uses_of_a_weight,
    uses_of_an_activation,
    sums_with_others,
)


def tensors():
    weight = torch.zeros(SIZE, SIZE, requires_grad=True)
    return weight, [torch.zeros(ROWS, SIZE, requires_grad=True) for _ in range(USES)]


@pytest.mark.parametrize("compute", COMPUTATIONS, ids=lambda compute: compute.__name__)
def test_gradients_of_one_tensor_are_added_up_as_on_real_tensors(compute):
    weight, others = tensors()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=activities, profile_memory=True) as profile,
        torch.profiler.record_function("step"),
    ):
        compute(weight, others).sum().backward()
    measured, _ = peak_of(profile, within="step", alive_bytes=0)

    watch = StorageWatch()
    with watch.mode:
        weight, others = tensors()
        with watch.recording(list) as recording, watch.phase("backward"):
            compute(weight, others).sum().backward()
        predicted = find_peak(recording).size_bytes
    assert predicted == measured
