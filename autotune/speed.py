"""Tokens per second of timed steps, and the time that compilation took before them."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch._dynamo.utils


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """One optimizer step; the device was synchronized before and after."""

    seconds: float
    tokens: int
    loss: float
    """Mean token loss, in nats."""


def measured_speed(warmup: Sequence[TimedStep], timed: Sequence[TimedStep], *, compiled: bool) -> dict[str, Any]:
    """A measurement's fields: median and half the interquartile range of tokens per second, and compilation apart.

    Compilation is what the warm-up steps took beyond a steady step. Nothing where nothing was timed.
    """
    if not timed:
        return {}
    speeds = [step.tokens / step.seconds for step in timed]
    lower, _, upper = statistics.quantiles(speeds, n=4)
    steady_seconds = statistics.median(step.seconds for step in timed)
    return {
        "tokens_per_second": statistics.median(speeds),
        "tokens_per_second_spread": (upper - lower) / 2,
        "compile_seconds": sum(max(0.0, step.seconds - steady_seconds) for step in warmup) if compiled else None,
        "compile_cache": _compile_cache_use() if compiled else None,
    }


def _compile_cache_use() -> Literal["miss", "partial", "hit"]:
    """Whether this process found its graphs in inductor's disk cache."""
    counters = torch._dynamo.utils.counters
    hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    misses = counters["inductor"]["fxgraph_cache_miss"] + counters["aot_autograd"]["autograd_cache_miss"]
    return "partial" if hits and misses else "hit" if hits else "miss"
