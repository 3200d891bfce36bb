"""The driver's error for pinned memory is that for device memory; it means host memory."""

import pytest
import torch

from autotune.execution.process.failures import measurement_of_exception
from autotune.shipped.activation_offload import to_host

pytestmark = pytest.mark.gpu


def test_memory_that_cannot_be_pinned_is_out_of_host_memory():
    """Requests more than a process can address, from a tensor of a few bytes."""
    huge = torch.zeros(1, dtype=torch.uint8, device="cuda").as_strided((2**47,), (0,))
    with pytest.raises(RuntimeError, match="CUDA error: out of memory") as raised:
        to_host(huge)
    measurement = measurement_of_exception(raised.value, device_type="cuda")
    assert (measurement.outcome, measurement.message) == (
        "out_of_memory",
        "the host ran out of memory",
    )
