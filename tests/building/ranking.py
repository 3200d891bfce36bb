"""Hand-made records and predictions for tests of samplers."""

from autotune.spec.prediction import Forecast, Prediction
from autotune.spec.result import TrialRecord
from tests.building.studies import CAP_BYTES, MIB, measured

__all__ = ["CAP_BYTES", "MIB", "forecast", "record"]


def record(config, *, number=0, **changes):
    measurement = measured(seconds_by_part=None, **changes)
    return TrialRecord(
        **vars(measurement),
        number=number,
        config=config,
        feasible=measurement.outcome == "ok",
        seconds=4.0,
    )


def forecast(config, *, peak_memory_bytes, uncertainty=0.0):
    return Forecast(
        config=config,
        prediction=Prediction(
            device="cpu",
            fake_device="cpu",
            peak_memory_bytes=peak_memory_bytes,
            upper_bound_bytes=int(peak_memory_bytes * (1 + uncertainty)),
            lower_bound_bytes=int(peak_memory_bytes * (1 - uncertainty)),
            phase="backward",
            module="",
            operator="",
            bytes_by_category={},
            parameters=1,
            holders=(),
        ),
    )
