"""Bounds how far a measured peak may be from its prediction, from `studies/predictor_accuracy/`.

The pairs of prediction and measurement in that study are split into halves by a hash: the bounds
are set with the calibration half and tested with the other, and with the models of
`studies/new_models/`, which were not used to set the shares. They account for what is neither in
fake tensors nor measured beforehand: the scratch of large 16-bit products, and numbers and
indices that some operators allocate internally. They are shares of the peak: the
bytes that are added are those of such numbers, and matter for models of a few MiB only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from autotune.spec.config import CUDA_GRAPHS, TrainingConfig
from autotune.spec.workload import Workload

Group = Literal["eager fp32", "eager 16-bit", "compiled fp32", "compiled 16-bit"]
"""Configurations whose predictions have errors of the same kind."""
Scope = Literal["eager", "compiled"]


@dataclass(frozen=True, kw_only=True)
class PredictionError:
    """The largest expected difference between predicted and measured peak, above or below."""

    share: float
    """Relative part: a share of the predicted peak."""
    size_bytes: int
    """Absolute part in bytes, added to the relative one."""

    def upper_bound(self, peak_bytes: int) -> int:
        return peak_bytes + round(self.share * peak_bytes) + self.size_bytes

    def lower_bound(self, peak_bytes: int) -> int:
        return max(0, peak_bytes - round(self.share * peak_bytes) - self.size_bytes)


MEASURED_ON_CPU: Mapping[Group, PredictionError] = {
    "eager fp32": PredictionError(share=0.002, size_bytes=16 * 1024),
    "eager 16-bit": PredictionError(share=0.02, size_bytes=32 * 1024),
    "compiled fp32": PredictionError(share=0.005, size_bytes=16 * 1024),
    "compiled 16-bit": PredictionError(share=0.06, size_bytes=32 * 1024),
}
"""Shares: more than twice the largest difference in the calibration half, and in 16 bit more than
the largest one in both halves (0.4 % eager, 5.2 % compiled), which is from before the scratch of
products was measured. Bytes: twice the largest difference in fp32 (8,192 of indices), and in 16 bit
as much again for two states of random numbers.

The scratch of a large bf16 product (2.7 MiB were observed for 2,048 x 1,024 x 1,024) is not
measured. It matters only where the peak is reached during a product, of a model whose weights and
activations are then tens of MiB.
"""

MEASURED_ON_CUDA: Mapping[Scope, PredictionError] = {
    "eager": PredictionError(share=0.02, size_bytes=16 * 1024**2),
    "compiled": PredictionError(share=0.05, size_bytes=16 * 1024**2),
}
"""From `studies/gpu/`: peaks on one H200 with torch 2.11, of the built-in models with 27 M, 114 M
and 1.6 B parameters and nearly every technique. Shares: more than twice the largest difference,
0.5 % eager and 2.3 % compiled. Bytes: those of some of the allocator's pieces, each of
which may be 1 MiB larger than its tensor."""

MEASURED_MODELS = frozenset(("gpt", "deep-one"))
MEASURED_CAPABILITY = "9.0"

ASSUMED_ON_CUDA = PredictionError(share=0.10, size_bytes=64 * 1024**2)
"""An assumption, for what was not measured on a GPU: other models, other GPUs, and trainings on
several devices, whose kernels may allocate what is not counted.

Ten of the eleven published peaks of an RTX 4090 in `studies/peak_memory/` are within these bounds.
The absolute part is the size of two of the larger cuBLAS workspaces.
"""

ASSUMED_OF_GRAPHS = PredictionError(share=0.70, size_bytes=64 * 1024**2)
"""An assumption, for trainings as CUDA graphs: their peak is what the allocator has reserved, which
for small models was up to 70 % more than what tensors took (docs/several-gpus.md), and is what was
predicted. None was measured.
"""


def group_of(config: TrainingConfig) -> Group:
    """Returns the group of configurations whose error applies to `config`."""
    is_32_bit = config.precision in ("fp32", "tf32")
    if config.compile == "none":
        return "eager fp32" if is_32_bit else "eager 16-bit"
    return "compiled fp32" if is_32_bit else "compiled 16-bit"


def is_measured_on_cuda(workload: Workload, compute_capability: str | None) -> bool:
    """Returns whether predictions for such a GPU were compared with peaks of this model."""
    return (
        compute_capability == MEASURED_CAPABILITY
        and workload.model in MEASURED_MODELS
        and workload.devices_per_trial == 1
    )


def error_of(
    config: TrainingConfig, *, device: str, is_measured: bool = False, estimated_bytes: int = 0
) -> PredictionError:
    """Returns how far the prediction of `config` on `device` (cpu or cuda) may be from the peak.

    On CUDA, `is_measured` is what `is_measured_on_cuda` returns. `estimated_bytes` are those that
    are only estimated, of cuDNN, or that a kernel of a CPU may allocate that could not be measured.
    They may be wrong by as much, so they are added to the error.
    """
    if device != "cuda":
        error = MEASURED_ON_CPU[group_of(config)]
    elif config.compile_mode in CUDA_GRAPHS:
        error = ASSUMED_OF_GRAPHS
    elif is_measured:
        error = MEASURED_ON_CUDA["eager" if config.compile == "none" else "compiled"]
    else:
        error = ASSUMED_ON_CUDA
    return replace(error, size_bytes=error.size_bytes + estimated_bytes)
