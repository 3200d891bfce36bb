"""How far a measured peak may be from its prediction: bounds taken from `studies/predictor_accuracy/`.

That study's pairs of prediction and measurement are split into halves by a hash. Only `eager fp32` on a CPU is
calibrated on one half and held to the other; each bound says what it rests on. What is left are bytes that no fake
tensor shows: the scratch of oneDNN's bf16 products, and numbers and indices that some operators keep for themselves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autotune.config import TrainingConfig

Group = Literal["eager fp32", "eager 16-bit", "compiled"]
"""Configurations whose predictions err in the same way."""


@dataclass(frozen=True, kw_only=True)
class PredictionError:
    """A measured peak is expected within this of the predicted one, above or below."""

    share: float
    """Of the predicted peak."""
    size_bytes: int
    """Added to it."""

    def upper_bound(self, peak_bytes: int) -> int:
        return peak_bytes + round(self.share * peak_bytes) + self.size_bytes

    def lower_bound(self, peak_bytes: int) -> int:
        return max(0, peak_bytes - round(self.share * peak_bytes) - self.size_bytes)


MEASURED_ON_CPU: Mapping[Group, PredictionError] = {
    "eager fp32": PredictionError(share=0.001, size_bytes=16 * 1024),
    "eager 16-bit": PredictionError(share=0.01, size_bytes=256 * 1024),
}
"""eager fp32: more than twice the worst difference of the calibration half. No pair of the other half lies outside.

eager 16-bit: more than twice the worst difference of *both* halves. Peaks within a bf16 product are rare: the
calibration half held none, and one pair of the other half lay outside a bound made from it. So this bound has had no
test of its own, and scratch of 2.7 MiB was seen in products of 1,024 columns, wider than those of the study.
"""

ASSUMED_FOR_COMPILED_ON_CPU = PredictionError(share=0.02, size_bytes=1024**2)
"""An assumption, not a calibration: too few compiled configurations have been measured to derive a bound from them."""

ASSUMED_ON_CUDA = PredictionError(share=0.10, size_bytes=64 * 1024**2)
"""An assumption, not a calibration: no prediction for CUDA has been compared with a measurement yet.

The size is that of two of the larger cuBLAS workspaces; the share allows for other kernels than those assumed.
"""


def group_of(config: TrainingConfig) -> Group:
    if config.compile != "none":
        return "compiled"
    return "eager fp32" if config.precision in ("fp32", "tf32") else "eager 16-bit"


def error_of(config: TrainingConfig, *, device: str) -> PredictionError:
    if device == "cuda":
        return ASSUMED_ON_CUDA
    return MEASURED_ON_CPU.get(group_of(config), ASSUMED_FOR_COMPILED_ON_CPU)
