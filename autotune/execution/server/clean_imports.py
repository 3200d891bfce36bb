"""Imports modules without initializing CUDA, after which forked processes could not use it.

Some modules check for a GPU when they are imported. torch asks NVML where it can. Without NVML, or
where CUDA_VISIBLE_DEVICES names a slice of a GPU (`MIG-...`), it asks the CUDA runtime, which
initializes CUDA in this process. Therefore a forked child answers the question instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from autotune.execution.server.forked import ForkFailed, run_in_fork


class CudaTouched(Exception):
    """Processes forked from this one could not use CUDA; the text says why."""


@contextmanager
def without_touching_cuda() -> Iterator[None]:
    """While the block runs, torch gets the number of CUDA devices from a forked child.

    Does nothing for a torch without CUDA. Raises CudaTouched where CUDA was initialized, or where
    this torch cannot be patched.
    """
    # The caller, the fork server, imports this module before its environment and signals are set.
    import torch  # noqa: PLC0415

    if not hasattr(torch._C, "_cuda_getDeviceCount"):
        yield
        return
    if not hasattr(torch.cuda, "_device_count_nvml"):
        raise CudaTouched(
            f"torch {torch.__version__} counts CUDA devices in another way "
            "than the releases autotune was tested with"
        )
    count_by_runtime = torch._C._cuda_getDeviceCount
    count_by_nvml = torch.cuda._device_count_nvml

    def restore() -> None:
        torch._C._cuda_getDeviceCount = count_by_runtime
        torch.cuda._device_count_nvml = count_by_nvml

    def count() -> int:
        restore()
        return torch.cuda.device_count()

    @cache
    def count_in_a_child() -> int:
        try:
            return int(run_in_fork(count))
        except ForkFailed:  # for example without a driver
            return 0

    def count_unknown() -> int:
        return -1  # what torch returns without NVML, which would stay open in this process

    torch._C._cuda_getDeviceCount = count_in_a_child
    torch.cuda._device_count_nvml = count_unknown
    try:
        yield
    finally:
        restore()
    if torch.cuda.is_initialized() or run_in_fork(torch.cuda._is_in_bad_fork):
        raise CudaTouched("CUDA was initialized while modules were imported")
