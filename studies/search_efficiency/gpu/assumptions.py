"""What is known of a card, and what the table of its configurations assumes.

Where an assumption comes from stands in the README beside this folder. None of it is read by the
search that is judged with the table.
"""

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

FOLDER = Path(__file__).parent

_SPREAD_OF_EFFICIENCIES = (0.7, 1.3)
_SPREAD_OF_COMPILING = (0.3, 3.0)
_SPREAD_OF_HOST = (0.5, 2.0)
"""Between which factors a redrawn assumption lies, evenly in its logarithm."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU: measured rates, or those of a data sheet."""

    name: str
    source: str
    memory_bytes: int
    context_bytes: int
    compute_capability: str
    matrix_flops_per_second: Mapping[str, float]
    bandwidth_bytes_per_second: float
    host_link_bytes_per_second: float

    @classmethod
    def read(cls, name_or_file: str) -> "Card":
        """Returns the card of a name such as h200, or of a JSON file."""
        file = Path(name_or_file)
        if not file.suffix:
            file = FOLDER / f"{name_or_file}.json"
        return cls(**json.loads(file.read_text()))


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Everything that the table assumes; times in seconds, shares of a rate, logarithms."""

    linear_efficiency: Mapping[str, float] = field(
        default_factory=lambda: {
            "fp32": 0.99,
            "tf32": 0.75,
            "bf16": 0.66,
            "fp16": 0.66,
            "fp8": 0.38,
        }
    )
    """Of the linear layers' products, by format."""
    attention_efficiency: Mapping[str, float] = field(
        default_factory=lambda: {
            "fp32": 1.0,
            "tf32": 0.35,
            "bf16": 0.60,
            "fp16": 0.60,
            "fp8": 0.60,
        }
    )
    """Of attention's products, which in fp8 are computed in bf16."""
    bandwidth_efficiency: Mapping[str, float] = field(
        default_factory=lambda: {"none": 0.88, "block": 0.88, "model": 0.90}
    )
    """By compilation."""
    products_of_few_rows: Mapping[int, float] = field(
        default_factory=lambda: {16: 1.0, 8: 0.99, 4: 0.95, 2: 0.86, 1: 0.72}
    )
    """By micro batch."""
    host_time: float = 1.0
    """Of all that follows until the update, relative to the H200's host."""
    eager_host: Mapping[str, float] = field(
        default_factory=lambda: {"bf16-mixed": 0.017, "fp16-mixed": 0.0175, "fp8": 0.100}
    )
    """Of a micro batch; of other precisions `other_eager_host`."""
    other_eager_host: float = 0.013
    compiled_host: Mapping[str, float] = field(
        default_factory=lambda: {"block": 0.006, "model": 0.0035}
    )
    compiled_fp8_host: float = 1.5
    checkpointing_host: Mapping[str, float] = field(
        default_factory=lambda: {
            "none": 1.0,
            "attention": 1.15,
            "selective": 1.6,
            "every-4": 1.15,
            "every-2": 1.25,
            "block": 1.4,
            "sqrt": 1.35,
        }
    )
    offloaded_host: float = 1.5
    chunked_loss_host: float = 0.0005
    update_host: Mapping[str, float] = field(
        default_factory=lambda: {
            "none": 0.010,
            "foreach": 0.0016,
            "kernel": 0.0007,
            "backward": 0.011,
        }
    )
    stochastic_update_host: float = 0.025
    update_bytes: Mapping[str, float] = field(
        default_factory=lambda: {"none": 90.0, "foreach": 60.0, "kernel": 28.0, "backward": 32.0}
    )
    """Of each parameter, as predicted."""
    overlap: float = 4.0
    """Device and host together take the norm of this order of both."""
    residual_of_kind: float = 0.05
    residual: float = 0.015
    """What the roofline misses, drawn once for precision, compilation and checkpointing, and once
    for each configuration."""
    noise: float = 0.007
    """Of a speed, from run to run."""
    compile_seconds: Mapping[str, float] = field(
        default_factory=lambda: {"none": 0.0, "block": 12.9, "model": 38.5}
    )
    cached_compile_seconds: Mapping[str, float] = field(
        default_factory=lambda: {"none": 0.0, "block": 2.5, "model": 6.0}
    )
    compile_fp8: float = 2.0
    evaluation_share: Mapping[str, float] = field(
        default_factory=lambda: {"none": 0.0, "block": 0.17, "model": 0.25}
    )
    """Of compiling, what only the evaluation needs."""
    gains: bool = True
    """Whether 16 bit, fp8 and compiling are faster than fp32 at all."""

    def redrawn(self, seed: int) -> "Assumptions":
        """Returns them with each efficiency, the compilations and the host's time redrawn."""
        rng = random.Random(f"assumptions {seed}")

        def factor(spread: tuple[float, float]) -> float:
            return math.exp(rng.uniform(math.log(spread[0]), math.log(spread[1])))

        def each(shares: Mapping[str, float]) -> dict[str, float]:
            return {name: share * factor(_SPREAD_OF_EFFICIENCIES) for name, share in shares.items()}

        bandwidth = factor(_SPREAD_OF_EFFICIENCIES)
        compiling = {kind: factor(_SPREAD_OF_COMPILING) for kind in self.compile_seconds}

        def compiled(seconds: Mapping[str, float]) -> dict[str, float]:
            return {kind: compiling[kind] * value for kind, value in seconds.items()}

        return replace(
            self,
            linear_efficiency=each(self.linear_efficiency),
            attention_efficiency=each(self.attention_efficiency),
            bandwidth_efficiency={
                kind: min(1.0, bandwidth * share)
                for kind, share in self.bandwidth_efficiency.items()
            },
            compile_seconds=compiled(self.compile_seconds),
            cached_compile_seconds=compiled(self.cached_compile_seconds),
            host_time=self.host_time * factor(_SPREAD_OF_HOST),
        )
