"""How much of what a device can do a trial uses: model FLOPs utilization, and the roofline.

Model FLOPs utilization (MFU) is the share of the device's matrix rate that a training reaches with
the FLOPs that the model needs, without those that a technique recomputes (Chowdhery et al. 2022,
PaLM, https://arxiv.org/abs/2204.02311, appendix B):

    MFU = tokens per second * model FLOPs per token / matrix rate of all devices of the trial

The roofline (Williams, Waterman, Patterson 2009, https://doi.org/10.1145/1498765.1498785) is how
fast a configuration could be at most, if each of the two were the only limit:

    tokens per second <= matrix rate / all FLOPs per token
    tokens per second <= bandwidth / bytes accessed per token

The rates are measured on the device (`execution/process/device_peaks.py`), FLOPs and bytes are
counted in the prediction of the step (`predictor/work.py`). The second limit is that of memory
outside of caches: what stays in a cache between two operators is not bound by it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autotune.spec.config import Precision
from autotune.spec.prediction import Prediction
from autotune.spec.result import DeviceInfo, TrialRecord

MatrixFormat = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp64"]
"""The number format in which matrix products are computed."""

_FORMATS: Mapping[Precision, MatrixFormat] = {
    "fp32": "fp32",
    "tf32": "tf32",
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
    "bf16-stochastic": "bf16",
    "fp16-mixed": "fp16",
    "fp8": "fp8",
    "int8-mixed": "int8",
    "fp64": "fp64",
    "fp16-true": "fp16",
}


def matrix_format(precision: Precision) -> MatrixFormat | None:
    """Returns the format of the matrix products of most layers; None where it is not known.

    That is so for a script whose weights have several formats.
    """
    return _FORMATS.get(precision)


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """A trial compared with what the device can do. All are of all devices of the trial."""

    format: MatrixFormat
    flops_per_second: float
    """What it computes, recomputed FLOPs included."""
    flops_per_byte: float
    """Its arithmetic intensity."""
    matrix_rate: float
    """The most FLOPs per second in its format."""
    bandwidth: float
    """The most bytes per second."""

    @property
    def attainable(self) -> float:
        """The most FLOPs per second at this intensity."""
        return min(self.matrix_rate, self.bandwidth * self.flops_per_byte)

    @property
    def is_bound_by_memory(self) -> bool:
        """Whether the bandwidth is the lower of the two limits."""
        return self.bandwidth * self.flops_per_byte < self.matrix_rate


def matrix_rate(record: TrialRecord, device: DeviceInfo) -> float | None:
    """Returns the FLOPs per second of all devices of a trial, in its format; None if unknown."""
    rates = device.matrix_flops_per_second or {}
    kind = matrix_format(record.config.precision)
    rate = None if kind is None else rates.get(kind)
    return None if not rate else rate * _devices(record, device)


def _devices(record: TrialRecord, device: DeviceInfo) -> int:
    """Returns how many times the device's rates a trial has: all ranks on a CPU share it."""
    return 1 if device.type == "cpu" else record.devices


def model_flops_utilization(record: TrialRecord, device: DeviceInfo) -> float | None:
    """Returns the share of the matrix rate; None where speed, FLOPs or rate are not known."""
    rate = matrix_rate(record, device)
    speed = record.places_per_second
    if rate is None or speed is None or not record.model_flops_per_token:
        return None
    return speed * record.model_flops_per_token / rate


def with_utilization(records: Sequence[TrialRecord], device: DeviceInfo) -> list[TrialRecord]:
    """Returns the records with their model FLOPs utilization, where it is known.

    A trial that is faster than its roof proves that the roof is too low, as it is where something
    else used the device while it was measured. Then no trial in that format has a utilization.
    """
    too_low = disturbed_formats(records, device)
    with_it = []
    for record in records:
        utilization = model_flops_utilization(record, device)
        if utilization is None or matrix_format(record.config.precision) in too_low:
            with_it.append(record)
        else:
            with_it.append(replace(record, model_flops_utilization=utilization))
    return with_it


def disturbed_formats(
    records: Iterable[TrialRecord], device: DeviceInfo
) -> set[MatrixFormat | None]:
    """Returns the formats in which a trial was faster than large products, as measured."""
    return {
        matrix_format(record.config.precision)
        for record in records
        if (model_flops_utilization(record, device) or 0.0) > 1.0
    }


def roofline(
    record: TrialRecord, device: DeviceInfo, prediction: Prediction | None
) -> Roofline | None:
    """Returns where a trial is under the roofline; None where something of it is not known.

    Its prediction says how many bytes a step accesses.
    """
    kind = matrix_format(record.config.precision)
    rate, bandwidth = matrix_rate(record, device), device.bandwidth_bytes_per_second
    size_bytes = None if prediction is None else prediction.bytes_accessed_per_token
    flops = flops_per_token(record)
    speed = record.places_per_second
    if not (kind and rate and bandwidth and flops and size_bytes and speed):
        return None
    return Roofline(
        format=kind,
        flops_per_second=speed * flops,
        flops_per_byte=flops / size_bytes,
        matrix_rate=rate,
        bandwidth=bandwidth * _devices(record, device),
    )


def flops_per_token(record: TrialRecord) -> float | None:
    """Returns all FLOPs of a trial per token, recomputed ones included."""
    if record.model_flops_per_token is None or record.recomputed_flops_per_token is None:
        return None
    return record.model_flops_per_token + record.recomputed_flops_per_token
