"""Counts the peak memory of a training as trials do."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from autotune.shipped.cpu_peak import peak_of, reallocate, storage_bytes


class PeakMemory:
    """The peak memory of training: of one step on a CPU, of all that follows it on a GPU."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.bytes = 0

    @contextmanager
    def of_step(
        self, resident: Callable[[], Iterable[Tensor]], *, moves: bool = True
    ) -> Iterator[None]:
        """Must surround one step after the first, which makes the optimizer's state.

        `resident` returns what is there before and after a step. On a CPU it is moved, so that the
        release of what the step replaces is seen; without `moves` that counts as if it stayed.
        """
        if self.device_type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            yield
            return
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
            resident_bytes = (reallocate if moves else storage_bytes)(resident())
            with record_function("measured step"):
                yield
        self.bytes, _ = peak_of(recording, within="measured step", alive_bytes=resident_bytes)

    def read(self) -> int:
        """Returns the bytes; 0 if they were not measured."""
        return torch.cuda.max_memory_allocated() if self.device_type == "cuda" else self.bytes
