"""Imports that must not touch CUDA: a process that has initialized it cannot fork others that use it.

Modules ask while they are imported whether there is a GPU. torch answers from NVML where it can,
and otherwise (no NVML, or CUDA_VISIBLE_DEVICES names a slice of a GPU, `MIG-...`) from the CUDA
runtime, in this very process. So the question is answered by a forked child, which may touch
whatever it needs to.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from autotune.execution.server.forked import ForkFailed, in_a_fork


class CudaTouched(Exception):
    """Says why processes forked from this one could not use CUDA."""


@contextmanager
def without_touching_cuda() -> Iterator[None]:
    """While the block runs, the number of CUDA devices is asked in a child.

    Raises CudaTouched where that fails.

    torch without CUDA has nothing to ask.
    """
    import torch

    if not hasattr(torch._C, "_cuda_getDeviceCount"):
        yield
        return
    if not hasattr(torch.cuda, "_device_count_nvml"):
        raise CudaTouched(
            f"torch {torch.__version__} counts CUDA devices in another way than the releases autotune was tested with"
        )
    count_by_runtime, count_by_nvml = torch._C._cuda_getDeviceCount, torch.cuda._device_count_nvml

    def restore() -> None:
        torch._C._cuda_getDeviceCount = count_by_runtime
        torch.cuda._device_count_nvml = count_by_nvml

    def count() -> int:
        restore()
        return torch.cuda.device_count()

    @cache
    def count_in_a_child() -> int:
        try:
            return int(in_a_fork(count))
        except ForkFailed:  # as where there is no driver
            return 0

    torch._C._cuda_getDeviceCount = count_in_a_child
    torch.cuda._device_count_nvml = lambda: (
        -1
    )  # not known from NVML, which would stay open in this process
    try:
        yield
    finally:
        restore()
    if not _can_be_forked():
        raise CudaTouched("CUDA was initialized while modules were imported")


def _can_be_forked() -> bool:
    import torch

    return not torch.cuda.is_initialized() and not in_a_fork(torch.cuda._is_in_bad_fork)
