"""Tokens per second of timed steps, and the time that compilation took before them."""

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
    """One optimizer step, from the moment the device had finished the one before it until it had finished this one."""

    seconds: float
    tokens: int
    loss: float
    """Mean token loss, in nats."""


StepEnd = Callable[[], tuple[float, float]]
"""Waits until a step has ended; returns its seconds and its loss."""


class StepClock(Protocol):
    """Times one step after the other, each from where it was restarted or the last step ended."""

    def restart(self) -> None: ...

    def step_ended(self, loss: Tensor | float) -> StepEnd:
        """To be called when all of a step has been asked for; the device may still be computing it."""


class HostClock:
    """Times steps that this process computes itself, in seconds of the host's clock."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._began = time.perf_counter()

    def step_ended(self, loss: Tensor | float) -> StepEnd:
        value = float(loss)
        began, self._began = self._began, time.perf_counter()
        seconds = self._began - began
        return lambda: (seconds, value)


class DeviceClock:
    """Times the steps of a CUDA device in seconds, by events in its stream: nothing waits between two steps.

    A device that is waited for after each step has nothing to do until the first kernel of the next
    one arrives. That is a larger share of a short step than of a long one, and no part of a
    training that does not wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        self._began = self._event()

    def step_ended(self, loss: Tensor | float) -> StepEnd:
        on_host = copied_to_host(loss)
        began, self._began = self._began, self._event()
        ended = self._began

        def wait() -> tuple[float, float]:
            ended.synchronize()
            return began.elapsed_time(ended) / 1000, float(on_host)

        return wait

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def copied_to_host(value: Tensor | float) -> Tensor | float:
    """Begins to copy a device's number to the host; it is there when the device has done all it has been asked for."""
    if isinstance(value, Tensor) and value.is_cuda:
        return value.detach().to("cpu", non_blocking=True)
    return float(value)


def make_clock(device: torch.device) -> StepClock:
    return DeviceClock(device) if device.type == "cuda" else HostClock()


def measured_speed(
    warmup: Sequence[TimedStep], timed: Sequence[TimedStep], *, compiled: bool
) -> dict[str, Any]:
    """A measurement's fields: median and half the interquartile range of tokens per second, and compilation apart.

    Compilation is what the warm-up steps took beyond a steady step. Nothing where nothing was
    timed.
    """
    if not timed:
        return {}
    speeds = [step.tokens / step.seconds for step in timed]
    lower, _, upper = statistics.quantiles(speeds, n=4)
    steady_seconds = statistics.median(step.seconds for step in timed)
    return {
        "tokens_per_second": statistics.median(speeds),
        "tokens_per_second_spread": (upper - lower) / 2,
        "compile_seconds": sum(max(0.0, step.seconds - steady_seconds) for step in warmup)
        if compiled
        else None,
        "compile_cache": _compile_cache_use() if compiled else None,
    }


def _compile_cache_use() -> Literal["miss", "partial", "hit"]:
    """Whether this process found its graphs in inductor's disk cache."""
    counters = torch._dynamo.utils.counters
    hits = (
        counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    )
    misses = (
        counters["inductor"]["fxgraph_cache_miss"] + counters["aot_autograd"]["autograd_cache_miss"]
    )
    return "partial" if hits and misses else "hit" if hits else "miss"
