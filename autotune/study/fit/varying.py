"""The size that `fit` varies: its values, and the workload and configuration of each value."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autotune.errors import InvalidInput
from autotune.shipped.fp8_sizes import FP8_MULTIPLE
from autotune.spec.config import EIGHT_BIT_PRECISIONS, TrainingConfig, check_legal
from autotune.spec.user_code import takes_size
from autotune.spec.workload import Workload

Vary = Literal["layers", "width", "seq-len", "micro-batch", "rank", "devices"]

_MOST = 2**16
"""Largest number of layers, heads or sequences, so that a search for tiny needs ends."""
_FINE, _COARSE, _COARSE_FROM = 8, 64, 512
"""Sequence lengths are multiples of 8, and from 512 tokens on of 64."""


@dataclass(frozen=True, kw_only=True)
class Varying:
    """One size of a workload that varies; all others stay as given.

    width: the number of heads grows with it; the size of a head and a given feed-forward width
    stay. micro-batch: the global batch is the micro batch itself (no accumulation), unless
    `keeps_global_batch`: then only divisors of the global batch are legal. rank: of the adapters;
    the layers of the model, which are not known here, may end it earlier. devices: those of a
    trial, among which the global batch is divided; here the fewest that fit are wanted.
    """

    vary: Vary
    workload: Workload
    keeps_global_batch: bool = False

    def __post_init__(self) -> None:
        if self.vary in ("layers", "width") and not takes_size(self.workload.model, self.vary):
            raise InvalidInput(
                f"{self.workload.model} has no parameter {self.vary}, so --vary {self.vary} is "
                "not possible",
                hint=f"give the function a parameter {self.vary}, or use --vary seq-len or "
                "micro-batch",
            )
        if self.vary == "width" and self.workload.model_config is not None:
            raise InvalidInput(
                "the width of a model that a config.json describes cannot vary",
                hint="use --vary layers, seq-len or micro-batch, or one of the built-in models",
            )
        if self.vary == "layers" and self.workload.layers is None:
            raise InvalidInput(
                "the model's config.json does not specify one number of layers, so it cannot vary",
                hint="use --vary seq-len or micro-batch",
            )

    @property
    def wants_fewest(self) -> bool:
        """Whether the need falls with the value, so that the smallest that fits is the result."""
        return self.vary == "devices"

    def legal_values(self, config: TrainingConfig) -> tuple[Sequence[int], str]:
        """Returns the values that `config` can be trained with, ascending, and why they end there.

        Raises InvalidInput if there is none.
        """
        if self.vary == "rank" and config.adapter == "none":
            raise InvalidInput(
                "without an adapter there is no rank to vary", hint="add --adapter lora"
            )
        if self._is_divisor or self.vary == "devices":
            legal = [size for size in self._values if not self._why_illegal(size, config)]
            if not legal:
                self._check(self._values[-1], config)  # raises the reason
            return legal, "a single device" if self.wants_fewest else "the whole global batch"
        values = self._values_for_precision(config)
        end = bisect_left(values, True, key=lambda value: bool(self._why_illegal(value, config)))
        if not end:
            self._check(values[0], config)  # raises the reason
        if end == len(values):
            return values, "not looked beyond"
        return values[:end], self._why_illegal(values[end], config)

    def _values_for_precision(self, config: TrainingConfig) -> Sequence[int]:
        """Returns the values, for 8 bits only those whose number of tokens they can multiply.

        Between values that they cannot multiply there are others that they can, so bisection needs
        them removed.
        """
        others = {"seq-len": config.micro_batch_size, "micro-batch": self.workload.sequence_length}
        if config.precision not in EIGHT_BIT_PRECISIONS or self.vary not in others:
            return self._values
        return [value for value in self._values if value * others[self.vary] % FP8_MULTIPLE == 0]

    def _why_illegal(self, value: int, config: TrainingConfig) -> str:
        """Returns why the value is illegal; empty if it is legal."""
        try:
            self._check(value, config)
        except InvalidInput as error:
            return error.message
        return ""

    def _check(self, value: int, config: TrainingConfig) -> None:
        workload, chosen = self.at(value, config)
        check_legal(chosen, workload.legality_context)

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
        if self._is_divisor or self.vary == "devices":
            batch = self.workload.global_batch
            return [size for size in range(1, batch + 1) if batch % size == 0]
        return range(1, _MOST + 1)

    def start(self, config: TrainingConfig) -> int:
        """Returns the first value to try: the one given.

        For a micro batch of a fixed global batch, the whole global batch (no accumulation).
        """
        if self.vary == "rank":
            return config.adapter_rank
        if self.vary == "devices":
            return self.workload.devices_per_trial
        if self.vary == "micro-batch":
            if self.keeps_global_batch:
                return self.workload.global_batch
            return config.micro_batch_size
        given = {
            "seq-len": self.workload.sequence_length,
            "layers": self.workload.layers,
            "width": self.workload.width,
        }[self.vary]
        assert given is not None
        return given

    def at(self, value: int, config: TrainingConfig) -> tuple[Workload, TrainingConfig]:
        """Returns the workload and configuration of a value.

        Raises InvalidInput for a value that the model cannot have.
        """
        match self.vary:
            case "layers":
                return replace(self.workload, layers=value), config
            case "seq-len":
                return replace(self.workload, sequence_length=value), config
            case "width":
                return replace(self.workload, width=value, heads=value // self._head_size), config
            case "micro-batch":
                batch = self.workload.global_batch if self.keeps_global_batch else value
                workload = replace(self.workload, global_batch=batch)
                return workload, replace(config, micro_batch_size=value)
            case "rank":
                return self.workload, replace(config, adapter_rank=value)
            case "devices":
                if value == 1:
                    config = replace(config, sharding="none", gradient_reduction="fp32")
                return self.workload.on_devices(value), config

    def accumulates(self, config: TrainingConfig) -> bool:
        """Returns whether an optimizer step may have several micro batches."""
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
            case "rank":
                return f"rank {value:,}"
            case "devices":
                return f"{value:,} device{'' if value == 1 else 's'}"

    @property
    def _head_size(self) -> int:
        _, width, heads = self.workload.block_sizes
        return width // heads
