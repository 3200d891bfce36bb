"""How far predictions may be from measurements: bounds taken from `studies/predictor_accuracy/`."""

from dataclasses import dataclass

from autotune.config import TrainingConfig


@dataclass(frozen=True, kw_only=True)
class PredictionError:
    """A measured peak was never outside [prediction - under, prediction + over]."""

    share: float
    """Of the predicted peak."""
    size_bytes: int
    """Added to it."""

    def upper_bound(self, peak_bytes: int) -> int:
        return peak_bytes + round(self.share * peak_bytes) + self.size_bytes

    def lower_bound(self, peak_bytes: int) -> int:
        return max(0, peak_bytes - round(self.share * peak_bytes) - self.size_bytes)


def error_of(config: TrainingConfig, *, device: str) -> PredictionError:
    return PredictionError(share=0.01, size_bytes=1024**2)
