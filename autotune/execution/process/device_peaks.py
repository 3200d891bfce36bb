"""Measures what a device can do: its rates of matrix products, its bandwidth, and its host.

The rate of large square products and that of a large copy are the roofs of the roofline model
(Williams, Waterman, Patterson 2009, https://doi.org/10.1145/1498765.1498785). They are measured
with the same torch, threads and clocks as the trials, not taken from a data sheet, whose figures
assume clocks that no device holds. Both are lower bounds: the best of several runs.

For the time that a step takes two more are measured: the rate of a linear layer of the workload's
own size, which is lower, and how long the host takes to run an operator that computes nearly
nothing. All of it together takes two seconds at most.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.analysis.roofline import MatrixFormat, matrix_format
from autotune.predictor.work import WorkMeter
from autotune.shipped.int8 import quantized_rows
from autotune.spec.config import Precision
from autotune.spec.workload import LinearShape

_FIRST_SIZE = 512
_LARGEST_SIZE = 16384
_ENOUGH_SECONDS = 0.004
"""A product that takes longer is not tried at twice the size: it would take eight times as long."""
_ENOUGH_RUNS = 8
_SHORTER = 0.99
_BUSY = 0.9
"""Share of the time that the threads of an undisturbed run compute."""
_LONGEST_SECONDS = 0.4
"""Of one measurement."""
_ALL_SECONDS = 2.0
_COPIED_BYTES = {"cpu": 2**27, "cuda": 2**30}
"""More than any cache holds."""
_SHARE_OF_MEMORY = 1 / 16
"""The most of the device's memory that is used."""
_MOST_ROWS = {"cpu": 1024, "cuda": 8192}
"""Of a layer's input: as many as the device needs to compute at its full rate."""
_SMALL_BLOCKS, _SMALL_WIDTH = 8, 16


def measure_peaks(
    device: torch.device,
    precisions: Sequence[Precision],
    *,
    memory_bytes: int,
    shape: LinearShape | None,
) -> dict[str, Any]:
    """Returns the fields of a `DeviceInfo` that say what the device can do.

    The formats are those that products in `precisions` are computed in, the first ones first. What
    does not run on the device is left out, and so is what something else disturbed all the time, or
    what there was no time for; the single numbers are None then. `shape` is that of the workload's
    layers, if it is known.
    """
    clock = _Clock(device=device, ends=time.perf_counter() + _ALL_SECONDS)
    limit_bytes = memory_bytes * _SHARE_OF_MEMORY
    size_bytes = int(min(_COPIED_BYTES[device.type], limit_bytes / 2))
    bandwidth = _bandwidth(clock, size_bytes)
    operator_seconds = _operator_seconds(clock)
    rates: dict[str, float] = {}
    layer_rates: dict[str, float] = {}
    for kind in dict.fromkeys(map(matrix_format, precisions)):
        if kind is None:
            continue
        try:
            rate = _matrix_rate(kind, clock, limit_bytes=limit_bytes)
            layer_rate = 0.0 if shape is None else _layer_rate(kind, clock, shape)
        except (RuntimeError, NotImplementedError, TypeError):
            continue  # such as fp8 on a GPU without it, whose trials fail as well
        if rate > 0:
            rates[kind] = max(rate, layer_rate)
        if layer_rate > 0:
            layer_rates[kind] = layer_rate
    return {
        "matrix_flops_per_second": rates,
        "layer_flops_per_second": layer_rates,
        "bandwidth_bytes_per_second": bandwidth,
        "operator_seconds": operator_seconds,
    }


@contextmanager
def _products_in(kind: MatrixFormat) -> Iterator[None]:
    """Allow products of fp32 matrices in tf32, or forbid them."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _matrix_rate(kind: MatrixFormat, clock: "_Clock", *, limit_bytes: float) -> float:
    """Returns the FLOPs per second of the fastest of growing square products; 0 for none."""
    best = 0.0
    size = _FIRST_SIZE
    with _products_in(kind):
        while size <= _LARGEST_SIZE and 3 * 4 * size**2 <= limit_bytes:
            seconds = clock.seconds(_product(kind, clock.device, (size, size, size)))
            if seconds is None:
                break
            best = max(best, 2 * size**3 / seconds)
            if seconds > _ENOUGH_SECONDS:
                break
            size *= 2
    return best


def _layer_rate(kind: MatrixFormat, clock: "_Clock", shape: LinearShape) -> float:
    """Returns the FLOPs per second of a linear layer's forward and backward pass; 0 if disturbed.

    In fp8 it is that of the forward pass.
    """
    most_rows, inner, columns = shape
    rows = min(most_rows, _MOST_ROWS[clock.device.type])
    products = [_product(kind, clock.device, (rows, inner, columns))]
    if kind != "fp8":
        products.append(_product(kind, clock.device, (rows, columns, inner)))
        products.append(_product(kind, clock.device, (inner, rows, columns)))

    def run() -> None:
        for product in products:
            product()

    with _products_in(kind):
        seconds = clock.seconds(run)
    return 0.0 if seconds is None else len(products) * 2 * rows * inner * columns / seconds


def _product(kind: MatrixFormat, device: torch.device, shape: LinearShape) -> Callable[[], Tensor]:
    """Returns a function that multiplies [rows, inner] by [inner, columns]."""
    rows, inner, columns = shape
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    dtype = dtypes.get(kind, torch.float32)
    first = torch.rand(rows, inner, device=device, dtype=dtype)
    second = torch.rand(columns, inner, device=device, dtype=dtype)
    if kind == "int8":
        first_8, second_8 = quantized_rows(first)[0], quantized_rows(second)[0]
        return lambda: torch._int_mm(first_8, second_8.t())
    if kind != "fp8":
        return lambda: first @ second.t()
    first_8, second_8 = (part.to(torch.float8_e4m3fn) for part in (first, second))
    scale = torch.ones((), device=device)
    return lambda: torch._scaled_mm(
        first_8, second_8.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16
    )


def _bandwidth(clock: "_Clock", size_bytes: int) -> float | None:
    """Returns the bytes per second, read and written, of a copy; None where it was disturbed."""
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=clock.device)
    target = torch.ones_like(source)
    seconds = clock.seconds(lambda: target.copy_(source))
    return None if seconds is None else 2 * size_bytes / seconds


def _operator_seconds(clock: "_Clock") -> float | None:
    """Returns how long an operator of a training takes that computes nearly nothing.

    That is what the host needs for it, autograd and views included. None where it was disturbed.
    """
    width = _SMALL_WIDTH
    blocks = [
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        for _ in range(_SMALL_BLOCKS)
    ]
    model = nn.Sequential(*blocks).to(clock.device)
    inputs = torch.zeros(width, width, device=clock.device)

    def step() -> None:
        model(inputs).sum().backward()
        model.zero_grad()

    step()  # what is done once, such as choosing kernels
    with _Counting() as counting:
        step()
    seconds = clock.seconds(step, threads=1)
    return None if seconds is None else seconds / counting.operators


class _Counting(TorchDispatchMode):
    """Counts operators, as the predictor does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = WorkMeter()

    @property
    def operators(self) -> float:
        return self._meter.per_token(tokens_recorded=1, tokens_of_step=1, devices=1).operators

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._meter.count("", func, args, kwargs or {}, result)
        return result


@dataclass(frozen=True, kw_only=True)
class _Clock:
    """Times what runs on a device, until a moment of `time.perf_counter()`."""

    device: torch.device
    ends: float

    def seconds(self, run: Callable[[], object], *, threads: int | None = None) -> float | None:
        """Returns the shortest time of a run; None where each one was disturbed.

        It is run until more runs do not shorten it, and for 0.4 seconds at most. On a CPU, a run
        counts only if its `threads`, by default all of torch's, had a core each all the time: while
        they wait for each other, they spin.
        """
        threads = threads or torch.get_num_threads()
        ends = min(self.ends, time.perf_counter() + _LONGEST_SECONDS)
        times: list[float] = []
        runs_since_shortest = 0
        if time.perf_counter() < ends:
            run()
        while runs_since_shortest < _ENOUGH_RUNS and time.perf_counter() < ends:
            self._synchronize()
            before, busy_before = time.perf_counter(), time.process_time()
            run()
            self._synchronize()
            seconds, busy_seconds = time.perf_counter() - before, time.process_time() - busy_before
            if self.device.type == "cpu" and busy_seconds < _BUSY * seconds * threads:
                continue
            runs_since_shortest += 1
            if not times or seconds < _SHORTER * min(times):
                runs_since_shortest = 0
            times.append(seconds)
        return max(min(times), 1e-9) if times else None

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
