"""The driver refuses pinned memory with the words it has for the device's own: the host's memory is meant."""

import pytest
import torch

from autotune.execution.server.failures import measurement_of_exception
from autotune.techniques.activation_offload import to_host

pytestmark = pytest.mark.gpu


def test_what_cannot_be_pinned_is_out_of_the_hosts_memory():
    """More than a process can address, of a tensor that takes a few bytes."""
    huge = torch.zeros(1, dtype=torch.uint8, device="cuda").as_strided((2**47,), (0,))
    with pytest.raises(RuntimeError, match="CUDA error: out of memory") as refused:
        to_host(huge)
    measurement = measurement_of_exception(refused.value, device_type="cuda")
    assert (measurement.outcome, measurement.message) == (
        "out_of_memory",
        "the host ran out of memory",
    )
