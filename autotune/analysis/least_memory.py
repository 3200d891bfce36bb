"""How much memory a training needs at least, from shapes alone: no model is built, no step is run.

A peak cannot be below either of two moments of a step:

    update    weights + gradients + optimizer state
    backward  weights + optimizer state + inputs of the blocks + logits, and of several micro
              batches the gradients of those before

What is not sure to be there counts as nothing: what is on the host, what an optimizer stores in a
few numbers, what a compiled program may compute again. What devices share out counts as divided
evenly, as no device can have less than its part if it is the one that has most.

There is no such bound from above: what a step keeps for its backward pass is decided by each
operator, which only a prediction sees.
"""

from autotune.spec.config import (
    FULL_PRECISIONS,
    QUANTIZED_EXPERTS,
    QUANTIZED_WEIGHTS,
    UPDATES_ON_HOST,
    TrainingConfig,
)
from autotune.spec.model_shape import ModelShape, shape_of
from autotune.spec.optimizers import OPTIMIZERS
from autotune.spec.workload import Workload

_NARROW_WEIGHTS = frozenset(("bf16-true", "bf16-stochastic", "fp16-true"))
_QUANTIZED_BYTES = {"nf4": 0.5, "int8": 1.0, "fp8": 1.0}
_BYTES_OF_SCALES = {"nf4": 1 / 64}
"""Of each weight, on each device: they are not divided among devices. nf4 has a byte for 64."""


def least_memory_bytes(workload: Workload, config: TrainingConfig) -> int | None:
    """Returns what the peak of a step on a device is at least; None for a model of unknown shape.

    It is a bound of `Prediction.peak_memory_bytes`, on the device that needs most.
    """
    shape = shape_of(workload)
    if shape is None or config.engine != "torch":
        return None
    dtype_bytes = 2 if config.precision in _NARROW_WEIGHTS else 4
    whole, parts = _devices_that_share(workload, config)
    is_on_host = config.offload == "all"
    trained_weights = _trained_weights(shape, workload, config)
    trained = trained_weights * dtype_bytes
    frozen, scales = (0.0, 0.0)
    if config.adapter != "none" and config.offload != "frozen":
        frozen, scales = _frozen(shape, config, dtype_bytes)
    weights = 0.0 if is_on_host else (trained + frozen) / parts + scales / whole
    are_freed = is_on_host or config.optimizer_fusion in ("backward", "as-is")
    gradient_bytes = 4 if config.gradient_accumulation_dtype == "fp32" else dtype_bytes
    gradients = 0.0 if are_freed else trained_weights * gradient_bytes / parts
    state = trained_weights * _state_bytes(config, dtype_bytes=dtype_bytes)
    state /= workload.devices_per_trial if config.sharding == "zero1" else parts
    kept = _inputs_of_blocks(shape, workload, config) + _logits(shape, workload, config)
    in_backward = kept / whole
    if config.micro_batch_size * workload.devices_per_trial < workload.global_batch:
        in_backward += gradients
    return int(weights + state + max(gradients, in_backward))


def _devices_that_share(workload: Workload, config: TrainingConfig) -> tuple[int, int]:
    """Returns among how many devices each matrix is split, and among how many weights are."""
    split = config.tensor_parallel
    if config.sharding == "hsdp":
        return split, split * config.sharding_group
    return split, workload.devices_per_trial if config.sharding in ("zero2", "zero3") else split


def _trained_weights(shape: ModelShape, workload: Workload, config: TrainingConfig) -> int:
    if config.adapter == "none":
        return shape.in_blocks + shape.in_experts + shape.beside_blocks
    matrices = shape.attention
    if config.adapter_targets != "attention":
        matrices += shape.feed_forward
    sides = sum(n + m for n, m in matrices)
    if config.adapter_targets == "experts":
        sides += sum(experts * (n + m) for experts, n, m in shape.experts)
    rank = min([config.adapter_rank, *workload.adapter_rank_pattern.values()])
    return shape.layers * rank * sides


def _frozen(shape: ModelShape, config: TrainingConfig, dtype_bytes: int) -> tuple[float, float]:
    """Returns the bytes of the frozen weights under an adapter, and of their scales."""
    weights = shape.in_blocks + shape.in_experts + shape.beside_blocks
    if config.base_weights == "trained":
        return weights * dtype_bytes, 0.0
    rest_bytes = 4 if config.precision in FULL_PRECISIONS else 2
    if config.base_weights not in QUANTIZED_WEIGHTS:
        return weights * rest_bytes, 0.0
    quantized = shape.in_blocks
    if config.base_weights in QUANTIZED_EXPERTS:
        quantized += shape.in_experts
    number_format = QUANTIZED_WEIGHTS[config.base_weights]
    codes = quantized * _QUANTIZED_BYTES[number_format]
    scales = quantized * _BYTES_OF_SCALES.get(number_format, 0.0)
    return codes + (weights - quantized) * rest_bytes, scales


def _state_bytes(config: TrainingConfig, *, dtype_bytes: int) -> float:
    """Returns the bytes of the optimizer's state on the device for each trained weight."""
    facts = OPTIMIZERS[config.optimizer]
    if facts.is_paged or config.offload in UPDATES_ON_HOST or facts.state < 0.5:
        return 0.0
    return facts.state * (4 if facts.state_form else dtype_bytes)


def _inputs_of_blocks(shape: ModelShape, workload: Workload, config: TrainingConfig) -> int:
    """Returns the bytes of what every block but the first reads, which its backward pass needs."""
    if config.activation_offload != "none" or config.compile == "model":
        return 0
    inputs = 1 if config.checkpointing == "sqrt" else shape.layers - 1
    numbers = config.micro_batch_size * workload.sequence_length * shape.width
    return inputs * numbers * (4 if config.precision in FULL_PRECISIONS else 2)


def _logits(shape: ModelShape, workload: Workload, config: TrainingConfig) -> int:
    """Returns the bytes of the logarithms of all probabilities and of their gradients."""
    if config.loss != "full":
        return 0
    numbers = config.micro_batch_size * (workload.sequence_length - 1) * shape.vocab_size
    if config.compile == "model":
        return 2 * numbers
    return 2 * numbers * (2 if config.precision in _NARROW_WEIGHTS else 4)
