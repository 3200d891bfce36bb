"""What may vary to find what fits: which values it has, and the workload and configuration that each stands for."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from autotune.errors import InvalidInput
from autotune.spec.config import FP8_MULTIPLE, TrainingConfig, check_legal
from autotune.spec.user_code import takes_size
from autotune.spec.workload import Workload

Vary = Literal["micro-batch", "seq-len", "layers", "width"]
VARY: tuple[Vary, ...] = get_args(Vary)

_MOST = 2**16
"""Of layers, heads or sequences: an end for what needs next to nothing."""
_FINE, _COARSE, _COARSE_FROM = 8, 64, 512
"""Sequence lengths are multiples of 8, from 512 tokens on of 64."""


@dataclass(frozen=True, kw_only=True)
class Varying:
    """One size of a workload let loose; all others stay as given.

    width: the number of heads grows with it, their size stays, and so does a feed-forward width
    that was given. micro-batch: the global batch is the micro batch itself (no accumulation),
    unless `keeps_global_batch`, where only its divisors are legal.
    """

    vary: Vary
    workload: Workload
    keeps_global_batch: bool = False

    def __post_init__(self) -> None:
        if self.vary in ("layers", "width") and not takes_size(self.workload.model, self.vary):
            raise InvalidInput(
                f"{self.workload.model} does not say that it takes a number of layers or a width",
                hint=f"give the function a parameter {self.vary}, or use --vary seq-len or micro-batch",
            )
        if self.vary == "width" and self.workload.model_config is not None:
            raise InvalidInput(
                "the width of a model that a config.json describes cannot vary",
                hint="use --vary layers, seq-len or micro-batch, or one of the built-in models",
            )

    def legal_values(self, config: TrainingConfig) -> tuple[Sequence[int], str]:
        """The values that `config` can be trained with, ascending, and why there are no more.

        Raises InvalidInput where there is none.
        """
        if self._is_divisor:
            legal = [size for size in self._values if not self._refusal(size, config)]
            if not legal:
                self._check(self._values[-1], config)  # raises the reason
            return legal, "the whole global batch"
        values = self._values_that_fill_products(config)
        end = bisect_left(values, True, key=lambda value: bool(self._refusal(value, config)))
        if not end:
            self._check(values[0], config)  # raises the reason
        return values[:end], self._refusal(values[end], config) if end < len(
            values
        ) else "not looked beyond"

    def _values_that_fill_products(self, config: TrainingConfig) -> Sequence[int]:
        """The values, for fp8 without those whose number of tokens it cannot multiply: there are legal ones between."""
        others = {"seq-len": config.micro_batch_size, "micro-batch": self.workload.sequence_length}
        if config.precision != "fp8" or self.vary not in others:
            return self._values
        return [value for value in self._values if value * others[self.vary] % FP8_MULTIPLE == 0]

    def _refusal(self, value: int, config: TrainingConfig) -> str:
        try:
            self._check(value, config)
        except InvalidInput as error:
            return error.message
        return ""

    def _check(self, value: int, config: TrainingConfig) -> None:
        workload, chosen = self.at(value, config)
        check_legal(chosen, workload.circumstances)

    @property
    def _is_divisor(self) -> bool:
        return self.vary == "micro-batch" and self.keeps_global_batch

    @property
    def _values(self) -> Sequence[int]:
        if self.vary == "seq-len":
            return [
                *range(_FINE, _COARSE_FROM, _FINE),
                *range(_COARSE_FROM, _MOST * _COARSE, _COARSE),
            ]
        if self.vary == "width":
            return range(self._head_size, (_MOST + 1) * self._head_size, self._head_size)
        if self._is_divisor:
            batch = self.workload.global_batch
            return [size for size in range(1, batch + 1) if batch % size == 0]
        return range(1, _MOST + 1)

    def start(self, config: TrainingConfig) -> int:
        """The value given; of a global batch that stays, the whole, where alone there is no accumulation."""
        if self.vary == "micro-batch":
            return (
                self.workload.global_batch if self.keeps_global_batch else config.micro_batch_size
            )
        given = {
            "seq-len": self.workload.sequence_length,
            "layers": self.workload.layers,
            "width": self.workload.width,
        }
        return given[self.vary]

    def at(self, value: int, config: TrainingConfig) -> tuple[Workload, TrainingConfig]:
        """Raises InvalidInput for a value that the model cannot have."""
        match self.vary:
            case "layers":
                return replace(self.workload, layers=value), config
            case "seq-len":
                return replace(self.workload, sequence_length=value), config
            case "width":
                return replace(self.workload, width=value, heads=value // self._head_size), config
            case "micro-batch":
                batch = self.workload.global_batch if self.keeps_global_batch else value
                return replace(self.workload, global_batch=batch), replace(
                    config, micro_batch_size=value
                )

    def accumulates(self, config: TrainingConfig) -> bool:
        """Whether an optimizer step may be of several micro batches."""
        if self.vary == "micro-batch":
            return self._is_divisor
        return config.micro_batch_size != self.workload.global_batch

    def describe(self, value: int) -> str:
        match self.vary:
            case "layers":
                return f"{value:,} layer{'' if value == 1 else 's'}"
            case "seq-len":
                return f"{value:,} tokens a sequence"
            case "width":
                return f"width {value:,}"
            case "micro-batch":
                return f"micro-batch {value:,}"

    @property
    def _head_size(self) -> int:
        return self.workload.width // self.workload.heads
