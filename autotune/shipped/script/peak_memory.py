"""Counts the peak memory of a script as trials do."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from autotune.shipped.cpu_peak import peak_of, reallocate
from autotune.shipped.script.written import DEVICE, Training, resident_tensors


class PeakMemory:
    """The peak memory of training: of one step on a CPU, of all that follows it on a GPU."""

    bytes = 0

    @contextmanager
    def of_step(self, training: Training) -> Iterator[None]:
        """Must surround one step after the first, which makes the optimizer's state."""
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
            yield
            return
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
            resident_bytes = reallocate(resident_tensors(training))
            with record_function("measured step"):
                yield
        self.bytes, _ = peak_of(recording, within="measured step", alive_bytes=resident_bytes)

    def read(self) -> int:
        """Returns the bytes; 0 if they were not measured."""
        return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else self.bytes
