"""The result of `fit`: a row for each configuration, and the real trial of the best."""

from dataclasses import dataclass
from typing import Any

from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Prediction
from autotune.spec.result import JSON_SCHEMA, DeviceInfo, Measurement
from autotune.study.fit.varying import Varying
from autotune.units import format_size


@dataclass(frozen=True, kw_only=True)
class FitRow:
    """The largest value of one configuration that fits.

    A value fits if the prediction's upper bound and a GPU's context are within the cap.
    """

    technique: str
    config: TrainingConfig
    value: int | None = None
    """None: no value fits, or none can be predicted."""
    prediction: Prediction | None = None
    """The prediction at `value`."""
    predictions_made: int
    message: str
    """Why the next value does not fit."""

    def to_dict(self) -> dict[str, Any]:
        prediction = self.prediction
        return {
            "technique": self.technique,
            "config": self.config.to_dict(),
            "value": self.value,
            "parameters": prediction and prediction.parameters,
            "predicted_peak_memory_bytes": prediction and prediction.peak_memory_bytes,
            "upper_bound_bytes": prediction and prediction.upper_bound_bytes,
            "devices": prediction and prediction.devices,
            "peak_memory_bytes_by_rank": prediction and prediction.peak_memory_bytes_by_rank,
            "predicted_tokens_per_second": prediction and prediction.predicted_tokens_per_second,
            "predicted_tokens_per_second_bounds": (
                prediction and prediction.predicted_tokens_per_second_bounds
            ),
            "bound_by": prediction and prediction.bound_by,
            "phase": prediction and prediction.phase,
            "bytes_by_category": prediction and dict(prediction.bytes_by_category),
            "predictions_made": self.predictions_made,
            "message": self.message,
        }


@dataclass(frozen=True, kw_only=True)
class RealTrial:
    """One real trial of a row's configuration at its value."""

    row: FitRow
    device: DeviceInfo
    measurement: Measurement

    @property
    def stayed_under(self) -> bool:
        return self.measurement.outcome == "ok"

    @property
    def went_over(self) -> bool:
        """Also False if the trial ended before it could tell, for example by a timeout."""
        return self.measurement.ran_out_of_memory

    def to_dict(self) -> dict[str, Any]:
        row, measured = self.row.to_dict(), self.measurement
        keys = ("technique", "config", "value", "predicted_peak_memory_bytes", "upper_bound_bytes")
        return {
            **{key: row[key] for key in keys},
            "device": self.device.name,
            "outcome": measured.outcome,
            "stayed_under": self.stayed_under,
            "peak_memory_bytes": measured.peak_memory_bytes,
            "device_bytes": measured.device_bytes,
            "peak_phase": measured.peak_phase,
            "message": measured.message,
        }


@dataclass(frozen=True, kw_only=True, repr=False)
class FitResult:
    """All rows of a request."""

    varying: Varying
    cap_bytes: int
    context_bytes: int
    """Bytes of the device's context, counted in addition to a prediction; 0 except for CUDA."""
    device_type: str
    compute_capability: str | None
    """Compute capability of the GPU predicted for; None for a CPU, or if one was assumed."""
    torch_version: str | None
    rows: tuple[FitRow, ...]
    confirmed: RealTrial | None = None
    not_confirmed: str = ""
    """Why there was no real trial."""

    @property
    def best(self) -> FitRow | None:
        """The row with the largest value, or the fewest devices; of equal values the first."""
        sign = -1 if self.varying.wants_fewest else 1
        return max(
            (row for row in self.rows if row.value),
            key=lambda row: sign * (row.value or 0),
            default=None,
        )

    def __str__(self) -> str:
        """Returns the rows and how the real trial of the best ended, as text."""
        cap = format_size(self.cap_bytes)
        lines = [f"What fits under {cap}, by prediction", ""]
        lines += [f"  {self._line(row)}" for row in self.rows]
        lines.append("")
        if self.best is None:
            lines.append(f"Nothing fits under {cap}.")
        elif self.confirmed is None:
            lines.append(f"Not confirmed by a trial: {self.not_confirmed}.")
        elif self.confirmed.stayed_under:
            lines.append(f"Confirmed under the cap on {self.confirmed.device.name}.")
        else:
            message = self.confirmed.measurement.message or self.confirmed.measurement.outcome
            lines.append(f"Not confirmed on {self.confirmed.device.name}: {message}.")
        return "\n".join(lines)

    def _line(self, row: FitRow) -> str:
        if row.prediction is None or row.value is None:
            return f"{row.technique}: {row.message}"
        peak = format_size(row.prediction.peak_memory_bytes)
        bound = format_size(row.prediction.upper_bound_bytes)
        fits = f"{self.varying.describe(row.value)}, {peak}, at most {bound}"
        beyond = "fewer" if self.varying.wants_fewest else "one more"
        return f"{row.technique}: {fits}; {beyond}: {row.message}"

    def __repr__(self) -> str:
        """Returns the text, which Python and notebooks show, instead of the fields."""
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": JSON_SCHEMA,
            "vary": self.varying.vary,
            "cap_bytes": self.cap_bytes,
            "context_bytes": self.context_bytes,
            "device": self.device_type,
            "compute_capability": self.compute_capability,
            "torch_version": self.torch_version,
            "workload": self.varying.workload.to_dict(),
            "rows": [row.to_dict() for row in self.rows],
            "confirmed": self.confirmed and self.confirmed.to_dict(),
            "not_confirmed": self.not_confirmed,
        }
