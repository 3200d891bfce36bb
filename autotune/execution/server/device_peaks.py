"""Measures what a device can do at most: its rate of matrix products, and its memory bandwidth.

The two are the roofs of the roofline model (Williams, Waterman, Patterson 2009,
https://doi.org/10.1145/1498765.1498785). They are measured with the same torch, threads and clocks
as the trials, not taken from a data sheet, whose figures assume clocks that no device holds. Both
are lower bounds: the best of several runs of one square product, and of one copy.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autotune.analysis.roofline import MatrixFormat, matrix_format
from autotune.spec.config import Precision

_FIRST_SIZE = 512
_LARGEST_SIZE = 16384
_ENOUGH_SECONDS = 0.004
"""A product that takes longer is not tried at twice the size: it would take eight times as long."""
_ENOUGH_RUNS = 8
_SHORTER = 0.99
_BUSY = 0.9
"""Share of the time that the threads of an undisturbed run compute."""
_LONGEST_SECONDS = 0.4
_COPIED_BYTES = {"cpu": 2**27, "cuda": 2**30}
"""More than any cache holds."""
_SHARE_OF_MEMORY = 1 / 16
"""The most of the device's memory that is used."""


def measure_peaks(
    device: torch.device, precisions: Sequence[Precision], *, memory_bytes: int
) -> dict[str, Any]:
    """Returns {"matrix_flops_per_second": {format: rate}, "bandwidth_bytes_per_second": rate}.

    The formats are those that products in `precisions` are computed in. What does not run on the
    device is left out, and so is what something else disturbed all the time; the bandwidth is None
    then.
    """
    rates: dict[str, float] = {}
    for precision in precisions:
        kind = matrix_format(precision)
        if kind is None or kind in rates:
            continue
        try:
            rate = _matrix_rate(kind, device, limit_bytes=memory_bytes * _SHARE_OF_MEMORY)
        except (RuntimeError, NotImplementedError, TypeError):
            continue  # such as fp8 on a GPU without it, whose trials fail as well
        if rate > 0:
            rates[kind] = rate
    limit_bytes = memory_bytes * _SHARE_OF_MEMORY / 2
    size_bytes = int(min(_COPIED_BYTES[device.type], limit_bytes))
    return {
        "matrix_flops_per_second": rates,
        "bandwidth_bytes_per_second": _bandwidth(device, size_bytes),
    }


def _matrix_rate(kind: MatrixFormat, device: torch.device, *, limit_bytes: float) -> float:
    """Returns the FLOPs per second of the fastest square product in a number format."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    try:
        return _fastest(kind, device, limit_bytes=limit_bytes)
    finally:
        torch.set_float32_matmul_precision(before)


def _fastest(kind: MatrixFormat, device: torch.device, *, limit_bytes: float) -> float:
    """Returns the highest rate of growing sizes."""
    best = 0.0
    size = _FIRST_SIZE
    while size <= _LARGEST_SIZE and 3 * 4 * size**2 <= limit_bytes:
        seconds = _seconds(_product(kind, device, size), device)
        if seconds is None:
            break
        best = max(best, 2 * size**3 / seconds)
        if seconds > _ENOUGH_SECONDS:
            break
        size *= 2
    return best


def _product(kind: MatrixFormat, device: torch.device, size: int) -> Callable[[], Tensor]:
    """Returns a function that multiplies two square matrices of this size."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    dtype = dtypes.get(kind, torch.float32)
    first = torch.rand(size, size, device=device, dtype=dtype)
    second = torch.rand(size, size, device=device, dtype=dtype)
    if kind != "fp8":
        return lambda: first @ second
    # The second matrix has its columns in memory one after the other, which fp8 kernels require.
    first_8, second_8 = (part.to(torch.float8_e4m3fn) for part in (first, second))
    scale = torch.ones((), device=device)
    return lambda: torch._scaled_mm(
        first_8, second_8.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16
    )


def _bandwidth(device: torch.device, size_bytes: int) -> float | None:
    """Returns the bytes per second, read and written, of a copy; None where it was disturbed."""
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    seconds = _seconds(lambda: target.copy_(source), device)
    return None if seconds is None else 2 * size_bytes / seconds


def _seconds(run: Callable[[], object], device: torch.device) -> float | None:
    """Returns the shortest time of a run; None where each one was disturbed.

    It is run until more runs do not shorten it, and for 0.4 seconds at most. On a CPU, a run counts
    only if its threads had a core each all the time: while they wait for each other, they spin.
    """
    run()
    times: list[float] = []
    runs_since_shortest = 0
    began = time.perf_counter()
    while runs_since_shortest < _ENOUGH_RUNS and time.perf_counter() - began < _LONGEST_SECONDS:
        _synchronize(device)
        before, busy_before = time.perf_counter(), time.process_time()
        run()
        _synchronize(device)
        seconds, busy_seconds = time.perf_counter() - before, time.process_time() - busy_before
        if device.type == "cpu" and busy_seconds < _BUSY * seconds * torch.get_num_threads():
            continue
        runs_since_shortest += 1
        if not times or seconds < _SHORTER * min(times):
            runs_since_shortest = 0
        times.append(seconds)
    return max(min(times), 1e-9) if times else None


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
