"""What a training step of any configuration takes, told from one prediction of the plain training.

Nothing here is measured or fitted. The time is a roofline whose terms add up: on an H200 it was
within 1.4 % of three speeds that were measured alone, where the usual one, the larger of the two
terms, was 14 % too fast. It is never less than what the host needs to launch the kernels, which a
CPU runs in between.

    seconds = FLOPs / (share * rate) + bytes / (share * bandwidth)

The prediction counts FLOPs, bytes and memory of the plain training; a technique multiplies them.
The factors are those between predictions of a GPT of 16 blocks, width 768 and 1,024 tokens a
sequence (`studies/search_efficiency`), rounded. Of another model they are about right, and a search
corrects them by what it measures (`study/sampler/surrogate.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from autotune.analysis.roofline import matrix_format
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Prediction
from autotune.spec.result import DeviceInfo
from autotune.spec.study import StudyDefinition

SHARE_OF_RATE, SHARE_OF_BANDWIDTH = 0.7, 0.85
"""What a training reaches of the rates of large products and of large copies."""
HOST_LINK_BYTES_PER_SECOND = 25e9
"""Between a CUDA device and pinned host memory: PCIe 4.0 x16 reaches about 80 % of its 31.5 GB/s.
"""
HOST_SECONDS_OF_A_BLOCK: Mapping[str, float] = {"none": 0.8e-3, "block": 0.3e-3, "model": 0.2e-3}
"""To launch the kernels of a block's forward and backward pass: some 130 eager ones at 6 us."""
HOST_SECONDS_OF_FP8 = 4.0
"""Times as many kernels as in another format, where nothing is compiled."""
HOST_SECONDS_OF_AN_UPDATE: Mapping[str, float] = {"none": 0.6e-3, "backward": 0.6e-3}
"""To launch the update of a block's parameters one by one; the other kinds launch few kernels."""
USUAL_BLOCKS = 12
"""Of a model whose workload does not say how many it has."""

RECOMPUTED_FLOPS: Mapping[str, float] = {
    "attention": 1.13,
    "every-4": 1.07,
    "every-2": 1.14,
    "block": 1.27,
    "sqrt": 1.32,
}
RECOMPUTED_BYTES: Mapping[str, float] = {
    "attention": 1.17,
    "selective": 1.25,
    "every-4": 1.09,
    "every-2": 1.17,
    "block": 1.35,
    "sqrt": 1.39,
}
KEPT_ACTIVATIONS: Mapping[str, float] = {
    "attention": 0.7,
    "selective": 0.63,
    "every-4": 0.76,
    "every-2": 0.52,
    "block": 0.1,
    "sqrt": 0.27,
}
"""By checkpointing, relative to none."""
FLOPS_WITHOUT_BUDGET, BYTES_WITHOUT_BUDGET, LEAST_BUDGET = 0.27, 0.25, 0.1
"""What a memory budget of 0 adds to FLOPs and bytes, and the activations that it keeps at least."""
BYTES_BY_PRECISION: Mapping[str, float] = {
    "bf16-mixed": 0.6,
    "fp16-mixed": 0.6,
    "bf16-true": 0.5,
    "fp16-true": 0.5,
    "bf16-stochastic": 0.68,
    "fp8": 2.1,
}
"""Relative to fp32."""
COMPILED_BYTES: Mapping[str, float] = {"block": 0.74, "model": 0.69}
COMPILED_FP8_BYTES = 0.47
"""In fp8, whose conversions compiled code does within other kernels, relative to eager fp32."""
FULL_PRECISION = ("fp32", "tf32", "fp64")
NARROW_ACTIVATIONS, COMPILED_ACTIVATIONS, ACTIVATIONS_LEFT = 0.5, 0.85, 0.2
"""Of 16-bit or fp8 training, of compiled training, and on the device when they are offloaded."""
STATE_OF_OPTIMIZERS: Mapping[str, float] = {
    "adamw": 2.0,
    "adamw-8bit": 0.5,
    "paged-adamw": 0.0,
    "paged-adamw-8bit": 0.0,
    "adafactor": 0.05,
    "adafactor-fixed-rate": 0.05,
    "sgd": 1.0,
}
"""Relative to the weights."""
BASE_WEIGHTS: Mapping[str, float] = {"nf4": 0.14, "int8": 0.25, "bf16": 0.5}
"""Frozen weights under an adapter, relative to fp32."""
GRADIENTS_IN_BACKWARD, SHARE_OF_ADAPTER = 0.1, 0.02


@dataclass(frozen=True, kw_only=True)
class ExpectedStep:
    """Time and memory of configurations, from the prediction of the plain one."""

    device: DeviceInfo
    plain: Prediction
    plain_config: TrainingConfig
    blocks: int
    tokens_of_a_step: int
    global_batch: int

    @classmethod
    def of(cls, definition: StudyDefinition, plain: Prediction | None) -> "ExpectedStep | None":
        """Return it for a study, given its baseline's prediction.

        None without one, or where the device's rates or the FLOPs are not known.
        """
        if plain is None:
            return None
        workload = definition.workload
        expected = cls(
            device=definition.device,
            plain=plain,
            plain_config=definition.baseline_config(),
            blocks=workload.layers or USUAL_BLOCKS,
            tokens_of_a_step=workload.tokens_per_step,
            global_batch=workload.global_batch,
        )
        return None if expected.tokens_per_second(expected.plain_config) is None else expected

    def logarithm_of_speed(self, config: TrainingConfig) -> float:
        """Return log(tokens per second)."""
        speed = self.tokens_per_second(config)
        assert speed is not None, "`of` makes none without rates"
        return math.log(speed)

    def tokens_per_second(self, config: TrainingConfig) -> float | None:
        """Return the tokens of a step over its seconds; None where no rate is known."""
        rate = self._matrix_rate(config)
        bandwidth = self.device.bandwidth_bytes_per_second
        flops, accessed_bytes = self.plain.flops_per_token, self.plain.bytes_accessed_per_token
        if not rate or not bandwidth or not flops or not accessed_bytes:
            return None
        seconds = flops * _flops_factor(config) / (SHARE_OF_RATE * rate)
        seconds += accessed_bytes * _bytes_factor(config) / (SHARE_OF_BANDWIDTH * bandwidth)
        host_seconds = self._host_seconds(config)
        if self.device.type == "cpu":
            return 1 / (seconds + host_seconds)
        return 1 / max(seconds + self._offloading_seconds(config), host_seconds)

    def logarithm_of_peak(self, config: TrainingConfig) -> float:
        """Return the logarithm of the peak in bytes."""
        return math.log(self._static_bytes(config) + self._activation_bytes(config))

    def _matrix_rate(self, config: TrainingConfig) -> float | None:
        """Return the FLOPs per second of the format, or those of the next wider one."""
        rates = self.device.matrix_flops_per_second or {}
        wider: Mapping[str | None, str] = {"fp8": "bf16", "fp16": "bf16"}
        kind = matrix_format(config.precision)
        for known in (kind, wider.get(kind), "fp32"):
            if known is not None and rates.get(known):
                return rates[known]
        return None

    def _host_seconds(self, config: TrainingConfig) -> float:
        """Return for how long the host launches kernels, for each token."""
        seconds = HOST_SECONDS_OF_A_BLOCK.get(config.compile, 0.0)
        seconds *= RECOMPUTED_FLOPS.get(config.checkpointing, 1.0)
        if config.precision == "fp8" and config.compile == "none":
            seconds *= HOST_SECONDS_OF_FP8
        seconds *= self.global_batch / config.micro_batch_size
        seconds += HOST_SECONDS_OF_AN_UPDATE.get(config.optimizer_fusion, 0.0)
        return seconds * self.blocks / self.tokens_of_a_step

    def _offloading_seconds(self, config: TrainingConfig) -> float:
        """Return for how long activations move to the host and back, for each token."""
        if config.activation_offload == "none":
            return 0.0
        kept = self._activation_bytes(replace(config, activation_offload="none"))
        moved = 2 * (kept - self._activation_bytes(config))
        tokens = self.tokens_of_a_step * config.micro_batch_size / self.global_batch
        return moved / HOST_LINK_BYTES_PER_SECOND / tokens

    def _static_bytes(self, config: TrainingConfig) -> float:
        """Return the bytes of weights, gradients and optimizer state."""
        weights = float(self.plain.bytes_by_category.get("parameters", 0))
        if config.precision in ("bf16-true", "fp16-true", "bf16-stochastic"):
            weights *= 0.5
        gradients = GRADIENTS_IN_BACKWARD if config.optimizer_fusion == "backward" else 1.0
        trained = weights * (1 + gradients + STATE_OF_OPTIMIZERS.get(config.optimizer, 2.0))
        if config.adapter == "none":
            return trained
        return weights * BASE_WEIGHTS.get(config.base_weights, 1.0) + SHARE_OF_ADAPTER * trained

    @cached_property
    def _plain_activations(self) -> float:
        """Bytes of activations of the plain training."""
        peak_bytes = self.plain.peak_memory_bytes
        return max(peak_bytes - self._static_bytes(self.plain_config), 0.05 * peak_bytes)

    def _activation_bytes(self, config: TrainingConfig) -> float:
        factor = KEPT_ACTIVATIONS.get(config.checkpointing, 1.0)
        if config.memory_budget < 1:
            factor *= max(LEAST_BUDGET, config.memory_budget)
        if config.precision not in FULL_PRECISION:
            factor *= NARROW_ACTIVATIONS
        if config.compile != "none":
            factor *= COMPILED_ACTIVATIONS
        if config.activation_offload != "none":
            factor *= ACTIVATIONS_LEFT
        share = config.micro_batch_size / self.plain_config.micro_batch_size
        return self._plain_activations * factor * share


def _flops_factor(config: TrainingConfig) -> float:
    """Return the FLOPs of a configuration, relative to the plain training."""
    recomputed = FLOPS_WITHOUT_BUDGET * (1 - config.memory_budget)
    return RECOMPUTED_FLOPS.get(config.checkpointing, 1.0) + recomputed


def _bytes_factor(config: TrainingConfig) -> float:
    """Return the bytes that a step reads and writes, relative to the plain training."""
    factor = BYTES_BY_PRECISION.get(config.precision, 1.0) * COMPILED_BYTES.get(config.compile, 1.0)
    if config.precision == "fp8" and config.compile != "none":
        factor = COMPILED_FP8_BYTES
    factor *= RECOMPUTED_BYTES.get(config.checkpointing, 1.0)
    return factor * (1 + BYTES_WITHOUT_BUDGET * (1 - config.memory_budget))
