"""Measures the tokens per second of training steps, and the time that compilation took."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch._dynamo.utils
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """One optimizer step, timed from when the device finished the previous one until this one."""

    seconds: float
    tokens: int
    loss: float
    """Mean token loss, in nats."""


StepEnd = Callable[[], tuple[float, float]]
"""Waits until a step has ended; returns its seconds and its mean token loss."""


class StepClock(Protocol):
    """Times consecutive steps, each from the last restart or the end of the previous step."""

    def restart(self) -> None:
        """Starts timing the next step now."""

    def step_ended(self, loss: Tensor | float) -> StepEnd:
        """Must be called when a step has been launched; the device may still be computing it."""


class HostClock:
    """Times steps on the CPU, in seconds of the host's clock."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._began = time.perf_counter()

    def step_ended(self, loss: Tensor | float) -> StepEnd:
        value = float(loss)
        now = time.perf_counter()
        seconds = now - self._began
        self._began = now
        return lambda: (seconds, value)


class DeviceClock:
    """Times the steps of a CUDA device in seconds, by events in its stream, without waiting for it.

    After a wait the device is idle until the first kernel of the next step arrives. That time is a
    larger share of a short step than of a long one, and a training that does not wait for the
    device does not have it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        self._began = self._record_event()

    def step_ended(self, loss: Tensor | float) -> StepEnd:
        on_host = copied_to_host(loss)
        began = self._began
        ended = self._record_event()
        self._began = ended

        def wait() -> tuple[float, float]:
            ended.synchronize()
            return began.elapsed_time(ended) / 1000, float(on_host)

        return wait

    def _record_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def copied_to_host(value: Tensor | float) -> Tensor | float:
    """Starts a copy of a number to the host, which ends with the work queued on the device."""
    if isinstance(value, Tensor) and value.is_cuda:
        return value.detach().to("cpu", non_blocking=True)
    return float(value)


def make_clock(device: torch.device) -> StepClock:
    """Returns the clock for steps on `device`."""
    if device.type == "cuda":
        return DeviceClock(device)
    return HostClock()


class NothingCompiled(RuntimeError):
    """A trial that compiles has compiled nothing: its speed would be under a wrong name."""


def measured_speed(
    warmup: Sequence[TimedStep], timed: Sequence[TimedStep], *, compiled: bool
) -> dict[str, Any]:
    """Returns the fields of a measurement for speed and compilation, empty if nothing was timed.

    Speed is the median tokens per second of the timed steps, its spread half their interquartile
    range. Compilation is the time of the warm-up steps beyond that of a steady step. Raises
    NothingCompiled.
    """
    if not timed:
        return {}
    speeds = [step.tokens / step.seconds for step in timed]
    lower, _, upper = statistics.quantiles(speeds, n=4)
    steady_seconds = statistics.median(step.seconds for step in timed)
    fields: dict[str, Any] = {
        "tokens_per_second": statistics.median(speeds),
        "tokens_per_second_spread": (upper - lower) / 2,
        "compile_seconds": None,
        "compile_cache": None,
    }
    if compiled:
        if not torch._dynamo.utils.counters["stats"]["unique_graphs"]:
            raise NothingCompiled(
                "torch.compile has compiled no graph of this training, which runs as eager code: "
                "please report it with the model"
            )
        fields["compile_seconds"] = sum(max(0.0, step.seconds - steady_seconds) for step in warmup)
        fields["compile_cache"] = _compile_cache_use()
    return fields


def _compile_cache_use() -> Literal["miss", "partial", "hit"]:
    """Returns whether this process found its compiled graphs in inductor's disk cache."""
    counters = torch._dynamo.utils.counters
    hits = (
        counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    )
    misses = (
        counters["inductor"]["fxgraph_cache_miss"] + counters["aot_autograd"]["autograd_cache_miss"]
    )
    if hits and misses:
        return "partial"
    return "hit" if hits else "miss"
