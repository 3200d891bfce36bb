"""A prediction beside what it is compared with: a cap, and what was measured."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autotune.spec.cap import FITS, OVER, needed_bytes, verdict_of
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Prediction, context_bytes_on
from autotune.spec.result import JSON_SCHEMA, DeviceInfo, TrialRecord
from autotune.spec.workload import Workload
from autotune.study.explain.smallest_change import SmallestChange, smallest_change
from autotune.study.prediction.predictions import Forecaster
from autotune.units import format_size


@dataclass(frozen=True, kw_only=True)
class ComparedPrediction:
    """A prediction and what it is compared with: a cap and, for a trial, its measurement."""

    forecaster: Forecaster
    config: TrainingConfig
    prediction: Prediction
    cap_bytes: int | None
    record: TrialRecord | None = None
    measured_on: DeviceInfo | None = None
    """The device of the record's study; the prediction may be for another GPU."""
    change: SmallestChange | None = None
    """What makes the training of a trainer's file fit, where it does not surely."""

    @property
    def is_too_large(self) -> bool:
        return verdict_of(self.prediction, cap_bytes=self.cap_bytes) == OVER

    @property
    def measured_on_another_gpu(self) -> DeviceInfo | None:
        """The record's GPU if the prediction is for another compute capability, else None."""
        if self.measured_on is None or self.measured_on.compute_capability is None:
            return None
        if self.measured_on.compute_capability == self.forecaster.compute_capability:
            return None
        return self.measured_on

    def to_dict(self) -> dict[str, Any]:
        margin_bytes = None
        if self.cap_bytes is not None:
            margin_bytes = self.cap_bytes - needed_bytes(self.prediction)
        measured_bytes = None if self.record is None else self.record.peak_memory_bytes
        return {
            "schema": JSON_SCHEMA,
            "workload": self.forecaster.workload.to_dict(),
            "config": self.config.to_dict(),
            "cap_bytes": self.cap_bytes,
            "margin_bytes": margin_bytes,
            "measured_peak_memory_bytes": measured_bytes,
            **self._change_to_dict(),
            **self.prediction.to_dict(),
        }

    def with_change(self, *, progress: Callable[[str], None]) -> "ComparedPrediction":
        """Returns the answer with the smallest change that makes it fit; itself if it fits.

        `progress` gets what is predicted next, as a sentence without its full stop.
        """
        if verdict_of(self.prediction, cap_bytes=self.cap_bytes) in (None, FITS):
            return self
        change = smallest_change(
            self.forecaster,
            self.config,
            fits=lambda changed: verdict_of(changed, cap_bytes=self.cap_bytes) == FITS,
            progress=lambda what: progress(f"Predicting it with {what}"),
        )
        return replace(self, change=change)

    def _change_to_dict(self) -> dict[str, Any]:
        if self.change is None:
            return {}
        change = {
            "techniques": dict(self.change.changes),
            "fits": self.change.fits,
            "peak_memory_bytes": self.change.prediction.peak_memory_bytes,
            "needed_bytes": needed_bytes(self.change.prediction),
        }
        return {"smallest_change": change}

    def change_line(self) -> str:
        """Returns what makes it fit, or how far that goes; empty where it was not looked for."""
        if self.change is None or self.cap_bytes is None:
            return ""
        peak = format_size(self.change.prediction.peak_memory_bytes)
        most = format_size(self.change.prediction.upper_bound_bytes)
        what = f"{self.change.describe()}: peak {peak}, at most {most}"
        if self.change.fits:
            return f"The smallest change that makes it fit: {what}."
        return f"No change that was tried makes it surely fit. The nearest: {what}."

    def about(self) -> str:
        workload = self.forecaster.workload
        text = f"{workload.describe()}, {for_devices(workload, self.prediction.device)}"
        if self.prediction.fake_device != self.prediction.device:
            text += f", computed on fake {self.prediction.fake_device} tensors"
        return text

    def verdict(self) -> str:
        """Returns the peak, where in the step it is, and how it compares with the cap."""
        prediction = self.prediction
        text = (
            f"Peak {format_size(prediction.peak_memory_bytes)}, "
            f"at most {format_size(prediction.upper_bound_bytes)}, in {prediction.phase}"
        )
        if prediction.module:
            text += f", in {prediction.module}"
        if prediction.operator:
            text += f" at {prediction.operator}"
        if self.cap_bytes is None:
            return text
        cap = format_size(self.cap_bytes)
        if prediction.devices > 1:
            cap += " of each device"
        if self.is_too_large:
            excess = format_size(prediction.peak_memory_bytes - self.cap_bytes)
            return f"{text}: {excess} more than {cap}"
        if context := context_bytes_on(prediction.device):
            cap += f" with {format_size(context)} for the CUDA context"
        needed = needed_bytes(prediction)
        if needed > self.cap_bytes:
            return f"{text}: too close to {cap} to say"
        return f"{text}: {format_size(self.cap_bytes - needed)} below {cap}"


def for_devices(workload: Workload, device_type: str) -> str:
    """Returns the devices of a trial as text: `for cuda`, or `for each of 4 cuda devices`."""
    if workload.devices_per_trial == 1:
        return f"for {device_type}"
    return f"for each of {workload.devices_per_trial} {device_type} devices"
