"""Peak memory of the steady steps of a program that allocates by itself: nobody can say what is alive when they begin.

On a CPU everything from the first allocation on is recorded, so that also what dies within the
steps is known; the recording ends with them. On CUDA the allocator knows.
"""

from contextlib import ExitStack
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from autotune.memory.cpu import peak_of
from autotune.memory.meter import MemoryMeter, MemoryReading, make_meter

_STEADY = "autotune steady steps"


class WholeRunMeter(Protocol):
    """To be made before the program allocates; then `kernels_have_run`, `begin` and `end` are called once each."""

    def kernels_have_run(self) -> None: ...

    def begin(self) -> None:
        """The steady steps begin."""

    def end(self) -> None:
        """They have ended."""

    def reading(self) -> MemoryReading:
        """On CUDA the peak since `begin`; on a CPU that between `begin` and `end`."""


def make_whole_run_meter(
    device: torch.device,
    *,
    uuid: str | None,
    cap_bytes: int | None,
    new_context_bytes: int | None = None,
    shares_device: bool = False,
) -> WholeRunMeter:
    """As `make_meter`."""
    if device.type == "cuda":
        meter = make_meter(
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
        with self._meter.measuring(tuple):  # keeps the peak since the last one
            pass
        return self._meter.reading()
