"""Measures the peak memory of the steady steps of a user's script.

The tensors that are alive when these steps begin are not known. So on a CPU everything is recorded
from the first allocation to the end of the steps. On CUDA the allocator's counters include them.
"""

from contextlib import ExitStack
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from autotune.memory.cuda import CudaMeter
from autotune.memory.meter import MemoryMeter, MemoryReading
from autotune.shipped.cpu_peak import peak_of

_STEADY = "autotune steady steps"


class WholeRunMeter(Protocol):
    """Measures the steady steps of a script. Create it before the script allocates anything.

    Then call `kernels_have_run`, `begin` and `end` once each.
    """

    def kernels_have_run(self) -> None:
        """As in `MemoryMeter`: after the first step."""

    def begin(self) -> None:
        """Must be called when the steady steps begin."""

    def end(self) -> None:
        """Must be called when the steady steps have ended."""

    def reading(self) -> MemoryReading:
        """Returns the peak since `begin` on CUDA, and that between `begin` and `end` on a CPU."""


def make_whole_run_meter(
    device: torch.device,
    *,
    uuid: str | None,
    cap_bytes: int | None,
    new_context_bytes: int | None = None,
    shares_device: bool = False,
) -> WholeRunMeter:
    """Returns the meter for `device`; parameters and errors are those of `make_meter`."""
    if device.type == "cuda":
        meter = CudaMeter(
            device,
            uuid=uuid,
            cap_bytes=cap_bytes,
            new_context_bytes=new_context_bytes,
            shares_device=shares_device,
        )
        return _CudaRun(meter)
    return _CpuRun()


class _CpuRun:
    def __init__(self) -> None:
        self._recording = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._steady = record_function(_STEADY)
        self._peak_bytes = 0
        self._recording.__enter__()

    def kernels_have_run(self) -> None:
        pass

    def begin(self) -> None:
        self._steady.__enter__()

    def end(self) -> None:
        self._steady.__exit__(None, None, None)
        self._recording.__exit__(None, None, None)
        self._peak_bytes, _ = peak_of(self._recording, within=_STEADY)

    def reading(self) -> MemoryReading:
        return MemoryReading(
            peak_memory_bytes=self._peak_bytes, peak_phase="", peak_reserved_bytes=self._peak_bytes
        )


class _CudaRun:
    def __init__(self, meter: MemoryMeter) -> None:
        self._meter = meter
        self._steady = ExitStack()

    def kernels_have_run(self) -> None:
        self._meter.kernels_have_run()

    def begin(self) -> None:
        self._steady.enter_context(self._meter.measuring(tuple))

    def end(self) -> None:
        self._steady.close()

    def reading(self) -> MemoryReading:
        with self._meter.measuring(tuple):  # records the peak since the last measurement
            pass
        return self._meter.reading()
