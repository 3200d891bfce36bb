"""Dataclasses as rows of our tables, and back.

A row that is not what was written raises DamagedRow.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from datetime import UTC, datetime
from typing import Any

from autotune.errors import InvalidInput
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Forecast, Prediction
from autotune.spec.result import DIRECTIONS, DeviceInfo, Measurement, TrialRecord
from autotune.spec.search_space import SearchSpace
from autotune.spec.study import StudyDefinition, check_study_name
from autotune.spec.workload import Workload
from autotune.storage.tables import SCHEMA_VERSION
from autotune.storage.typed import check_types

_MEASUREMENT_FIELDS = tuple(field.name for field in fields(Measurement))

LONGEST_NAME, LONGEST_REASON = 200, 500
"""Characters of a trial's or a worker's name, and of a cause or a refusal."""


class DamagedRow(ValueError):
    """Says which row, and what in it."""


@contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except DamagedRow:
        raise
    except InvalidInput as error:
        raise DamagedRow(f"{what} cannot be read: {error.message}") from None
    except KeyError as error:
        raise DamagedRow(f"{what} cannot be read: it has no {error}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedRow(f"{what} cannot be read: {error}") from None


# -- what every database can hold ------------------------------------------------------------------


def kept_text(text: str, *, longest: int) -> str:
    """What a PostgreSQL column takes: not too long, without zero bytes and without halves of characters."""
    clean = text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
    return clean if len(clean) <= longest else clean[: longest - 1] + "…"


def measurement_values(measurement: Measurement) -> dict[str, Any]:
    """Without numbers that are not finite, which are no JSON: null like what was not measured."""
    return {name: _finite(getattr(measurement, name)) for name in _MEASUREMENT_FIELDS}


def finite_seconds(seconds: float | None) -> float | None:
    return None if seconds is None or not math.isfinite(seconds) else seconds


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: one for name, one in value.items() if _finite(one) is not None}
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -- definitions -----------------------------------------------------------------------------------


def definition_row(definition: StudyDefinition, *, trials_wanted: int) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "name": definition.name,
        "workload": definition.workload.to_dict(),
        "space": definition.space.to_dict(),
        "device": asdict(definition.device),
        "unavailable": definition.unavailable,
        "cap_bytes": definition.cap_bytes,
        "seed": definition.seed,
        "sampler": definition.sampler,
        "trials_wanted": trials_wanted,
    }


def definition_of(row: Any) -> StudyDefinition:
    """Raises DamagedRow."""
    with _reading(f"study {row.name!r}"):
        check_study_name(row.name)  # it names a folder and files
        definition = StudyDefinition(
            name=row.name,
            workload=Workload(**row.workload),
            space=SearchSpace.from_dict(row.space),
            device=DeviceInfo(**row.device),
            unavailable=row.unavailable,
            cap_bytes=row.cap_bytes,
            seed=row.seed,
            sampler=row.sampler,
        )
        for one in (definition, definition.device, definition.space):
            check_types(one)
        if type(row.trials_wanted) is not int:
            raise ValueError(f"trials_wanted is {row.trials_wanted!r}")
        return definition


# -- trials ----------------------------------------------------------------------------------------


def kept_name(name: str | None) -> str | None:
    return None if name is None else kept_text(name, longest=LONGEST_NAME)


def trial_row(record: TrialRecord) -> dict[str, Any]:
    """Of a trial that comes with its result, or, where it is interrupted, without one."""
    return {
        "number": record.number,
        "fingerprint": record.config.fingerprint,
        "name": kept_name(record.name),
        "config": record.config.to_dict(),
        "measurement": measurement_values(record) if record.is_finished else None,
        "seconds": finite_seconds(record.seconds),
        "finished_at": datetime.now(UTC) if record.is_finished else None,
    }


def record_of(
    row: Any,
    *,
    cap_bytes: int,
    predicted_bytes: float | None = None,
    losses: int = 0,
    cause: str = "",
) -> TrialRecord:
    """`losses`: how many attempts at it the machine has cost; the last one's `cause`.

    Raises DamagedRow.
    """
    lost = f"lost {losses} time{'s' * (losses > 1)}, not by its own fault: {cause}"
    unfinished = Measurement(outcome="interrupted", message=lost if losses else "has no result yet")
    with _reading(f"trial {row.number}"):
        measurement = asdict(unfinished) if row.measurement is None else row.measurement
        if measurement["perplexity"] is not None and measurement.get("perplexity_source") is None:
            measurement = {
                **measurement,
                "perplexity_source": "measured",
            }  # written before it could be shared
        record = TrialRecord(
            **measurement,
            number=row.number,
            config=_config_of(row),
            name=row.name,
            feasible=_is_feasible(measurement, cap_bytes=cap_bytes),
            predicted_peak_memory_bytes=None if predicted_bytes is None else int(predicted_bytes),
            seconds=row.seconds,
        )
        check_types(record)
        return record


def _is_feasible(measurement: dict[str, Any], *, cap_bytes: int) -> bool:
    device_bytes = measurement["device_bytes"]
    return (
        measurement["outcome"] == "ok"
        and all(measurement[objective] is not None for objective in DIRECTIONS)
        and device_bytes is not None
        and device_bytes <= cap_bytes
    )


def _config_of(row: Any) -> TrainingConfig:
    config = TrainingConfig(**row.config)
    if config.fingerprint != row.fingerprint:
        raise ValueError(
            f"its configuration has fingerprint {config.fingerprint}, not {row.fingerprint}"
        )
    return config


# -- predictions -----------------------------------------------------------------------------------


def forecast_row(forecast: Forecast) -> dict[str, Any]:
    return {
        "fingerprint": forecast.config.fingerprint,
        "config": forecast.config.to_dict(),
        "prediction": None if forecast.prediction is None else forecast.prediction.to_dict(),
        "refusal": kept_text(forecast.refusal, longest=LONGEST_REASON),
    }


def forecast_of(row: Any) -> Forecast:
    """Raises DamagedRow."""
    with _reading(f"prediction {row.fingerprint}"):
        config = _config_of(row)
        prediction = None if row.prediction is None else Prediction.from_dict(row.prediction)
        forecast = Forecast(config=config, prediction=prediction, refusal=row.refusal)
        for one in (forecast, *((prediction, *prediction.holders) if prediction else ())):
            check_types(one)
        return forecast
