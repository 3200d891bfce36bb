"""What a training step takes, told from one prediction and what was probed of the device.

Nothing here is fitted to a measured speed. A prediction counts what a step computes, moves and
launches, and the device was probed for how long each of them takes:

    products = FLOPs / rate of the workload's linear layers
    memory   = bytes accessed / bandwidth
    host     = operators / operators that the host launches per second

On the device the first two add up. On an H200 their sum was within 1.4 % of three speeds that were
measured alone, where the usual roofline, the larger of the two, was 14 % too fast. The host of a
CUDA device launches operators ahead, so that of device and host the slower one counts, and about
the root of the sum of squares where both are near (`docs/prediction.md`); a CPU does one after the
other. Where several GPUs train together, a step takes at least as long as their collectives, which
run while the devices compute (`communication.py`).

For other configurations than the predicted one, a technique multiplies the counts. The factors are
those between predictions of a GPT of 16 blocks, width 768 and 1,024 tokens a sequence, rounded. Of
another model they are about right, and a search corrects them by what it measures
(`study/sampler/surrogate.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from autotune.analysis.communication import Exchange, Links
from autotune.analysis.roofline import matrix_format
from autotune.spec.config import (
    FULL_PRECISIONS,
    QUANTIZED_WEIGHTS,
    SELECTIVE,
    UPDATES_ON_HOST,
    TrainingConfig,
)
from autotune.spec.optimizers import OPTIMIZERS
from autotune.spec.prediction import Prediction, Resource
from autotune.spec.result import DeviceInfo
from autotune.spec.setting import NO_LIMIT
from autotune.spec.study import StudyDefinition
from autotune.spec.workload import Workload
from autotune.units import parse_size

HOST_LINK_BYTES_PER_SECOND = 25e9
"""Between a CUDA device and pinned host memory: PCIe 4.0 x16 reaches about 80 % of its 31.5 GB/s.
"""
WEIGHT_BYTES, UPDATE_BYTES = 4, 28
"""Of each parameter in fp32: its weight, and what an update with Adam reads and writes."""
HOST_BYTES_PER_SECOND = 20e9
"""At which a host updates parameters: some threads of one socket."""
USUAL_OPERATOR_SECONDS: Mapping[str, float] = {"cuda": 2e-5, "cpu": 1e-5}
"""Where it was not probed: on the host of one H100 it was 3.2e-5."""
OPERATORS_OF_A_BLOCK = 55
"""Of a forward and backward pass, in predictions that older releases stored without a count."""
OPERATORS_OF_AN_UPDATE: Mapping[str, float] = {"none": 72.0, "backward": 86.0, "foreach": 15.0}
"""For each block; the fused kernel is one for all blocks."""
OPERATORS_BY_PRECISION: Mapping[str, float] = {
    "bf16-mixed": 1.4,
    "fp16-mixed": 1.4,
    "bf16-stochastic": 1.4,
    "fp8": 7.6,
    "int8-mixed": 6.6,
}
COMPILED_OPERATORS, COMPILED_OPERATORS_16_BIT = 0.5, 0.63
"""Relative to eager fp32."""
RECOMPUTED_OPERATORS: Mapping[str, float] = {
    "attention": 1.24,
    "selective": 1.35,
    "selective-2": 1.36,
    "save-attention": 1.43,
    "every-4": 1.11,
    "every-2": 1.22,
    "block": 1.44,
    "sqrt": 1.48,
}
"""By checkpointing, relative to none, as what follows."""
HOST_OF_SELECTIVE = 2.5
"""Times as long takes an operator of which Python decides whether it is recomputed (H100)."""
USUAL_BLOCKS = 12
"""Of a model whose workload does not say how many it has."""

SPEED_BOUNDS: Mapping[str, tuple[float, float]] = {"cuda": (0.6, 1.25), "cpu": (0.65, 1.25)}
NARROW_BOUNDS_ON_CPU = (0.35, 1.25)
"""By device and, on a CPU, for what is not full precision: between which multiples of an expected
speed a measured one is. All of 16 speeds alone on an H100 and an H200 were, and all of 16 on a CPU
(`docs/prediction.md`). None was measured on several GPUs."""

RECOMPUTED_FLOPS: Mapping[str, float] = {
    "attention": 1.13,
    "selective-2": 1.09,
    "save-attention": 1.21,
    "every-4": 1.07,
    "every-2": 1.14,
    "block": 1.27,
    "sqrt": 1.32,
}
RECOMPUTED_BYTES: Mapping[str, float] = {
    "attention": 1.17,
    "selective": 1.25,
    "selective-2": 1.28,
    "save-attention": 1.33,
    "every-4": 1.09,
    "every-2": 1.17,
    "block": 1.35,
    "sqrt": 1.39,
}
KEPT_ACTIVATIONS: Mapping[str, float] = {
    "attention": 0.7,
    "selective": 0.63,
    "selective-2": 0.49,
    "save-attention": 0.18,
    "every-4": 0.76,
    "every-2": 0.52,
    "block": 0.1,
    "sqrt": 0.27,
}
FLOPS_WITHOUT_BUDGET, BYTES_WITHOUT_BUDGET, LEAST_BUDGET = 0.27, 0.25, 0.1
"""What a memory budget of 0 adds to FLOPs and bytes, and the activations that it keeps at least."""
BYTES_BY_PRECISION: Mapping[str, float] = {
    "bf16-mixed": 0.6,
    "fp16-mixed": 0.6,
    "bf16-true": 0.5,
    "fp16-true": 0.5,
    "bf16-stochastic": 0.68,
    "fp8": 2.1,
    "int8-mixed": 1.84,
}
"""Relative to fp32."""
COMPILED_BYTES: Mapping[str, float] = {"block": 0.74, "model": 0.69}
COMPILED_BYTES_IN_8_BITS: Mapping[str, float] = {"fp8": 0.47, "int8-mixed": 0.65}
"""Where compiled code does conversions within other kernels, relative to eager fp32."""

NARROW_ACTIVATIONS, COMPILED_ACTIVATIONS, ACTIVATIONS_LEFT = 0.5, 0.85, 0.2
"""Of 16-bit or fp8 training, of compiled training, and on the device when they are offloaded."""
BASE_WEIGHTS: Mapping[str, float] = {"nf4": 0.14, "int8": 0.25, "bf16": 0.5, "fp16": 0.5}
"""Frozen weights under an adapter, relative to fp32."""
GRADIENTS_IN_BACKWARD, SHARE_OF_ADAPTER = 0.1, 0.02


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Where the time of a training goes, in seconds per token."""

    products: float
    memory: float
    offloading: float
    host: float
    collectives: float = 0.0
    launches_ahead: bool
    """Whether the host launches operators while the device computes, as with CUDA."""

    @property
    def seconds(self) -> float:
        """Returns the seconds per token."""
        on_device = self.products + self.memory + self.offloading
        if not self.launches_ahead:
            return on_device + self.host
        return max(math.hypot(on_device, self.host), self.collectives)

    @property
    def bound_by(self) -> Resource:
        """Returns what most of the time is spent on."""
        parts: dict[Resource, float] = {
            "matrix products": self.products,
            "memory bandwidth": self.memory,
            "host link": self.offloading,
            "host": self.host,
        }
        if self.collectives == self.seconds:
            return "collectives"
        return max(parts, key=parts.__getitem__)


@dataclass(frozen=True, kw_only=True)
class ExpectedStep:
    """Time and memory of configurations, from the prediction of one, usually the plain one."""

    device: DeviceInfo
    plain: Prediction
    plain_config: TrainingConfig
    blocks: int
    tokens_of_a_step: int
    global_batch: int
    devices: int = 1
    """Devices of a trial."""
    nodes: int = 1
    width: int | None = None
    """Of the activations between blocks; None where it is not known."""

    @classmethod
    def of(cls, definition: StudyDefinition, plain: Prediction | None) -> "ExpectedStep | None":
        """Returns it for a study, given its baseline's prediction.

        None without one, or where the device's rates or the FLOPs are not known.
        """
        if plain is None:
            return None
        return cls.from_prediction(
            plain,
            definition.baseline_config(),
            workload=definition.workload,
            device=definition.device,
        )

    @classmethod
    def from_prediction(
        cls,
        prediction: Prediction,
        config: TrainingConfig,
        *,
        workload: Workload,
        device: DeviceInfo,
    ) -> "ExpectedStep | None":
        """Returns it, given the prediction of any configuration; None as above."""
        expected = cls(
            device=device,
            plain=prediction,
            plain_config=config,
            blocks=workload.layers or USUAL_BLOCKS,
            tokens_of_a_step=workload.tokens_per_step,
            global_batch=workload.global_batch,
            devices=1 if device.type == "cpu" else workload.devices_per_trial,
            nodes=1 if device.type == "cpu" else workload.nodes_per_trial,
            width=workload.width,
        )
        return None if expected.time(config) is None else expected

    def logarithm_of_speed(self, config: TrainingConfig) -> float:
        """Returns log(tokens per second)."""
        speed = self.tokens_per_second(config)
        assert speed is not None, "`of` makes none without rates"
        return math.log(speed)

    def tokens_per_second(self, config: TrainingConfig) -> float | None:
        """Returns the speed of all devices; None where no rate is known."""
        time = self.time(config)
        return None if time is None else 1 / time.seconds

    def time(self, config: TrainingConfig) -> StepTime | None:
        """Returns where the time goes; None where no rate is known."""
        rate, bandwidth = self._matrix_rate(config), self.device.bandwidth_bytes_per_second
        flops, accessed_bytes = self.plain.flops_per_token, self.plain.bytes_accessed_per_token
        if not rate or not bandwidth or not flops or not accessed_bytes:
            return None
        flops *= _flops_factor(config) / _flops_factor(self.plain_config)
        accessed_bytes *= _bytes_factor(config) / _bytes_factor(self.plain_config)
        recomputed = self._recomputed_by_plan(config)
        # What is cheapest to compute again is recomputed first: matrix products come last.
        flops *= 1 + (RECOMPUTED_FLOPS["block"] - 1) * max(0.0, 2 * recomputed - 1)
        accessed_bytes *= 1 + (RECOMPUTED_BYTES["block"] - 1) * recomputed
        return StepTime(
            products=flops / rate / self.devices,
            memory=accessed_bytes / bandwidth / self.devices,
            offloading=self._offloading_seconds(config),
            host=self._host_seconds(config),
            collectives=self._collective_seconds(config),
            launches_ahead=self.device.type == "cuda",
        )

    def utilization(self, config: TrainingConfig) -> float | None:
        """Returns the model FLOPs utilization (`roofline.py`); None where a rate is not known."""
        speed, flops = self.tokens_per_second(config), self.plain.flops_per_token
        rate = (self.device.matrix_flops_per_second or {}).get(
            matrix_format(config.precision) or ""
        )
        if not speed or not flops or not rate:
            return None
        return speed * flops / _flops_factor(self.plain_config) / (rate * self.devices)

    def logarithm_of_peak(self, config: TrainingConfig) -> float:
        """Returns the logarithm of the peak in bytes."""
        return math.log(self._static_bytes(config) + self._activation_bytes(config))

    def _matrix_rate(self, config: TrainingConfig) -> float | None:
        """Returns the FLOPs per second of the format, or those of the next wider one.

        They are those of layers of the workload's size where these were probed.
        """
        layers = self.device.layer_flops_per_second or {}
        large = self.device.matrix_flops_per_second or {}
        wider: Mapping[str | None, str] = {
            "fp8": "bf16",
            "int8": "bf16",
            "fp16": "bf16",
        }
        kind = matrix_format(config.precision)
        for known in (kind, wider.get(kind), "fp32"):
            if known is not None and (rate := layers.get(known) or large.get(known)):
                return rate
        return None

    def _host_seconds(self, config: TrainingConfig) -> float:
        """Returns for how long the host runs or launches operators, for each token."""
        seconds = self.device.operator_seconds or USUAL_OPERATOR_SECONDS[self.device.type]
        operators = self._operators_of_a_pass * _operators_factor(config)
        operators /= _operators_factor(self.plain_config)
        operators *= self.global_batch / config.micro_batch_size
        operators *= 1 + (RECOMPUTED_OPERATORS["block"] - 1) * self._recomputed_by_plan(config)
        if config.checkpointing in SELECTIVE and config.compile == "none":
            operators *= HOST_OF_SELECTIVE
        operators += self._operators_of_an_update(config)
        return operators * seconds / self.tokens_of_a_step

    def _collective_seconds(self, config: TrainingConfig) -> float:
        """Returns how long collectives take at least, for each token.

        Of a training of adapters it is not known: little of the model is added up.
        """
        if config.adapter != "none" or self.plain_config.adapter != "none":
            return 0.0
        exchange = Exchange(
            devices=self.devices,
            nodes=self.nodes,
            trained=self.plain.parameters,
            blocks=self.blocks,
            width=self.width,
            tokens_of_a_step=self.tokens_of_a_step,
        )
        return exchange.seconds(config, Links.of(self.device.name)) / self.tokens_of_a_step

    @cached_property
    def _operators_of_a_pass(self) -> float:
        """Of a forward and backward pass of the predicted configuration, on each device."""
        if self.plain.operators_per_token is None:
            return OPERATORS_OF_A_BLOCK * self.blocks * _operators_factor(self.plain_config)
        operators = self.plain.operators_per_token * self.tokens_of_a_step / self.devices
        passes = max(operators - self._operators_of_an_update(self.plain_config), operators / 10)
        return passes * self.plain_config.micro_batch_size / self.global_batch

    def _operators_of_an_update(self, config: TrainingConfig) -> float:
        return OPERATORS_OF_AN_UPDATE.get(config.optimizer_fusion, 0.0) * self.blocks

    def _offloading_seconds(self, config: TrainingConfig) -> float:
        """Returns for how long the device waits for the host's memory, for each token."""
        if self.device.type == "cpu":
            return 0.0
        micro_batches = self.global_batch / config.micro_batch_size
        moved = 0.0
        if config.activation_offload != "none":
            kept = self._activation_bytes(replace(config, activation_offload="none"))
            moved += 2 * (kept - self._activation_bytes(config)) * micro_batches
        updated = 0.0
        weights = WEIGHT_BYTES * self.plain.parameters
        if config.offload in UPDATES_ON_HOST:
            moved += 2 * weights  # gradients to the host, and new weights back
            updated = UPDATE_BYTES * self.plain.parameters
        if config.offload == "all":
            moved += 2 * weights * micro_batches  # for the forward and the backward pass
        if config.offload == "frozen":
            moved += 2 * self._frozen_bytes(config) * micro_batches
        seconds = moved / HOST_LINK_BYTES_PER_SECOND + updated / HOST_BYTES_PER_SECOND
        return seconds / self.tokens_of_a_step / self.devices

    def _static_bytes(self, config: TrainingConfig) -> float:
        """Returns the bytes of weights, gradients and optimizer state."""
        weights = float(self.plain.bytes_by_category.get("parameters", 0))
        if config.precision in ("bf16-true", "fp16-true", "bf16-stochastic"):
            weights *= 0.5
        gradients = GRADIENTS_IN_BACKWARD if config.optimizer_fusion == "backward" else 1.0
        optimizer = OPTIMIZERS[config.optimizer]
        trained = weights * (1 + gradients + (0.0 if optimizer.is_paged else optimizer.state))
        if config.adapter == "none":
            return trained
        frozen = 0.0 if config.offload == "frozen" else self._frozen_bytes(config)
        return frozen + SHARE_OF_ADAPTER * trained

    def _frozen_bytes(self, config: TrainingConfig) -> float:
        """Returns the bytes of the frozen weights under an adapter."""
        weights = float(self.plain.bytes_by_category.get("parameters", 0))
        number_format = QUANTIZED_WEIGHTS.get(config.base_weights, config.base_weights)
        return weights * BASE_WEIGHTS.get(number_format, 1.0)

    @cached_property
    def _plain_activations(self) -> float:
        """Bytes of activations of the plain training."""
        peak_bytes = self.plain.peak_memory_bytes
        return max(peak_bytes - self._static_bytes(self.plain_config), 0.05 * peak_bytes)

    def _activation_bytes(self, config: TrainingConfig) -> float:
        factor = _activations_factor(config) / _activations_factor(self.plain_config)
        share = config.micro_batch_size / self.plain_config.micro_batch_size
        kept = 1 - (1 - KEPT_ACTIVATIONS["block"]) * self._recomputed_by_plan(config)
        return self._plain_activations * factor * share * kept

    def _recomputed_by_plan(self, config: TrainingConfig) -> float:
        """Returns how far an activation budget is from 0, everything fits, to 1, nothing is kept.

        A plan of a GPT at 0.53 accessed 16 % more bytes and computed no more FLOPs.
        """
        if config.activation_budget in (NO_LIMIT, self.plain_config.activation_budget):
            return 0.0
        whole = self._activation_bytes(replace(config, activation_budget=NO_LIMIT))
        room = parse_size(config.activation_budget) - self._static_bytes(config)
        return min(1.0, max(0.0, 1 - room / whole) / (1 - KEPT_ACTIVATIONS["block"]))


def with_speed(
    prediction: Prediction, config: TrainingConfig, *, workload: Workload, device: DeviceInfo
) -> Prediction:
    """Returns the prediction with the speed on a device; without, where its rates are not known."""
    expected = ExpectedStep.from_prediction(prediction, config, workload=workload, device=device)
    time = None if expected is None else expected.time(config)
    if expected is None or time is None:
        return prediction
    speed = 1 / time.seconds
    bounds = SPEED_BOUNDS[device.type]
    if device.type == "cpu" and config.precision not in FULL_PRECISIONS:
        bounds = NARROW_BOUNDS_ON_CPU
    return replace(
        prediction,
        predicted_tokens_per_second=speed,
        predicted_tokens_per_second_bounds=(bounds[0] * speed, bounds[1] * speed),
        bound_by=time.bound_by,
        predicted_model_flops_utilization=expected.utilization(config),
    )


def _activations_factor(config: TrainingConfig) -> float:
    """Returns what a micro batch keeps, relative to the plain training."""
    factor = KEPT_ACTIVATIONS.get(config.checkpointing, 1.0)
    if config.memory_budget < 1:
        factor *= max(LEAST_BUDGET, config.memory_budget)
    if config.precision not in FULL_PRECISIONS:
        factor *= NARROW_ACTIVATIONS
    if config.compile != "none":
        factor *= COMPILED_ACTIVATIONS
    if config.activation_offload != "none":
        factor *= ACTIVATIONS_LEFT
    return factor


def _operators_factor(config: TrainingConfig) -> float:
    """Returns the operators of a forward and backward pass, relative to the plain training."""
    factor = RECOMPUTED_OPERATORS.get(config.checkpointing, 1.0)
    if config.compile == "none":
        return factor * OPERATORS_BY_PRECISION.get(config.precision, 1.0)
    if config.precision in FULL_PRECISIONS:
        return factor * COMPILED_OPERATORS
    return factor * COMPILED_OPERATORS_16_BIT


def _flops_factor(config: TrainingConfig) -> float:
    """Returns the FLOPs of a configuration, relative to the plain training."""
    recomputed = FLOPS_WITHOUT_BUDGET * (1 - config.memory_budget)
    return RECOMPUTED_FLOPS.get(config.checkpointing, 1.0) + recomputed


def _bytes_factor(config: TrainingConfig) -> float:
    """Returns the bytes that a step reads and writes, relative to the plain training."""
    factor = BYTES_BY_PRECISION.get(config.precision, 1.0) * COMPILED_BYTES.get(config.compile, 1.0)
    if config.precision in COMPILED_BYTES_IN_8_BITS and config.compile != "none":
        factor = COMPILED_BYTES_IN_8_BITS[config.precision]
    factor *= RECOMPUTED_BYTES.get(config.checkpointing, 1.0)
    return factor * (1 + BYTES_WITHOUT_BUDGET * (1 - config.memory_budget))
