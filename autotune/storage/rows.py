"""Converts dataclasses to rows of the tables and back; an unreadable row raises DamagedRow."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass
from datetime import UTC, datetime
from typing import Any

from autotune.analysis.feasibility import is_feasible
from autotune.errors import InvalidInput
from autotune.spec.config import TrainingConfig
from autotune.spec.confirmation import (
    Confirmation,
    VariantMeasurement,
    confirmation_from_dict,
    confirmation_to_dict,
)
from autotune.spec.prediction import Forecast, Prediction
from autotune.spec.result import DeviceInfo, Measurement, TrialRecord
from autotune.spec.search_space import SearchSpace
from autotune.spec.study import StudyDefinition, check_study_name
from autotune.spec.workload import Workload
from autotune.storage.old_measurements import upgraded_measurement
from autotune.storage.tables import SCHEMA_VERSION
from autotune.storage.typed import check_types

_MEASUREMENT_FIELDS = tuple(field.name for field in fields(Measurement))
_ALWAYS_STORED = (
    "perplexity",
    "outcome",
    "device_bytes",
    "peak_memory_bytes",
    "tokens_per_second",
)
"""Fields that a stored measurement has in every release; later ones have added others."""

LONGEST_NAME, LONGEST_REASON = 200, 500
"""Characters of a trial's or worker's name, and of a cause or of why there is no prediction."""


class DamagedRow(ValueError):
    """A row cannot be read; the text says which one and why."""


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turns any error of the block into a DamagedRow that names `what`."""
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


# -- values that every database can store ----------------------------------------------------------


def storable_text(text: str, *, longest: int) -> str:
    """Returns `text` as PostgreSQL accepts it: at most `longest` characters, no NUL, no surrogates.

    A text that is too long ends with an ellipsis.
    """
    clean = text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
    if len(clean) <= longest:
        return clean
    return clean[: longest - 1] + "…"


def measurement_values(measurement: Measurement) -> dict[str, Any]:
    """Returns the fields as JSON; infinities and NaN, which JSON lacks, become null."""
    return {name: _plain(getattr(measurement, name)) for name in _MEASUREMENT_FIELDS}


def measurement_from_values(stored: Any) -> Measurement:
    """Returns the measurement of a JSON object, also of one that an earlier release wrote.

    Raises ValueError or TypeError where it is not a measurement.
    """
    measurement = _parse_measurement(stored)
    _check_measurement(measurement)
    return measurement


def _parse_measurement(stored: Any) -> Measurement:
    if not isinstance(stored, dict):
        raise ValueError(f"measurement is {stored!r:.60}")
    for name in _ALWAYS_STORED:
        if name not in stored:
            raise ValueError(f"it has no {name!r}")
    return Measurement.from_dict(upgraded_measurement(stored))


def _check_measurement(measurement: Measurement) -> None:
    """Raises ValueError for a field of another type, also of those within its provenance."""
    check_types(measurement)
    source = measurement.perplexity_source
    if source is not None:
        check_types(source)
        for failed in source.failed_seeds:
            check_types(failed)
    for trial in (measurement.reused_from, None if source is None else source.trial):
        if trial is not None:
            check_types(trial)


def finite_seconds(seconds: float | None) -> float | None:
    if seconds is None or not math.isfinite(seconds):
        return None
    return seconds


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, dict):
        return {name: item for name, item in value.items() if _plain(item) is not None}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


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


def definition_from_row(row: Any) -> StudyDefinition:
    """Returns the definition in a row of the studies table. Raises DamagedRow."""
    with _reading(f"study {row.name!r}"):
        check_study_name(row.name)  # it becomes the name of a folder and of files
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
        check_types(definition)
        check_types(definition.device)
        check_types(definition.space)
        if type(row.trials_wanted) is not int:
            raise ValueError(f"trials_wanted is {row.trials_wanted!r}")
        return definition


# -- trials ----------------------------------------------------------------------------------------


def storable_name(name: str | None) -> str | None:
    return None if name is None else storable_text(name, longest=LONGEST_NAME)


def trial_row(record: TrialRecord) -> dict[str, Any]:
    """Returns the row of a new trial: with its result, or without one where it is interrupted."""
    return {
        "number": record.number,
        "fingerprint": record.config.fingerprint,
        "name": storable_name(record.name),
        "config": record.config.to_dict(),
        "measurement": measurement_values(record) if record.is_finished else None,
        "seconds": finite_seconds(record.seconds),
        "finished_at": datetime.now(UTC) if record.is_finished else None,
    }


def record_from_row(
    row: Any,
    *,
    cap_bytes: int,
    predicted_bytes: float | None = None,
    losses: int = 0,
    cause: str = "",
) -> TrialRecord:
    """Returns the trial in a row of the trials table. Raises DamagedRow.

    `cap_bytes` decides whether it is feasible. `losses` is how many of its attempts the machine
    ended, and `cause` what ended the last one.
    """
    with _reading(f"trial {row.number}"):
        if row.measurement is None:
            message = _message_without_result(losses, cause)
            measurement = Measurement(outcome="interrupted", message=message)
        else:
            measurement = _parse_measurement(row.measurement)
        record = TrialRecord(
            **vars(measurement),
            number=row.number,
            config=_config_from_row(row),
            name=row.name,
            feasible=is_feasible(measurement, cap_bytes=cap_bytes),
            predicted_peak_memory_bytes=None if predicted_bytes is None else int(predicted_bytes),
            seconds=row.seconds,
        )
        _check_measurement(record)
        return record


def _message_without_result(losses: int, cause: str) -> str:
    if not losses:
        return "has no result yet"
    times = "1 time" if losses == 1 else f"{losses} times"
    return f"lost {times}, not by its own fault: {cause}"


def _config_from_row(row: Any) -> TrainingConfig:
    config = TrainingConfig(**row.config)
    _check_fingerprint(config, row)
    return config


def _check_fingerprint(config: TrainingConfig, row: Any) -> None:
    if config.fingerprint != row.fingerprint:
        raise ValueError(
            f"its configuration has fingerprint {config.fingerprint}, not {row.fingerprint}"
        )


# -- predictions -----------------------------------------------------------------------------------


def forecast_row(forecast: Forecast) -> dict[str, Any]:
    return {
        "fingerprint": forecast.config.fingerprint,
        "config": forecast.config.to_dict(),
        "prediction": None if forecast.prediction is None else forecast.prediction.to_dict(),
        "refusal": storable_text(forecast.error, longest=LONGEST_REASON),
    }


def forecast_from_row(row: Any) -> Forecast:
    """Returns the prediction in a row of the predictions table. Raises DamagedRow."""
    with _reading(f"prediction {row.fingerprint}"):
        config = _config_from_row(row)
        prediction = None if row.prediction is None else Prediction.from_dict(row.prediction)
        forecast = Forecast(config=config, prediction=prediction, error=row.refusal)
        check_types(forecast)
        if prediction:
            check_types(prediction)
            for holder in prediction.holders:
                check_types(holder)
        return forecast


# -- confirmations ---------------------------------------------------------------------------------

_POSITIVE = ("tokens_per_second", "speed_ratio", "partner_tokens_per_second", "perplexity")
"""Fields of confirmations that are above zero where they are known."""


def confirmation_row(confirmation: Confirmation) -> dict[str, Any]:
    """Returns the row of a new confirmation. Raises ValueError for one that is impossible."""
    return {
        "fingerprint": confirmation.config.fingerprint,
        "result": confirmation_values(confirmation),
    }


def confirmation_values(confirmation: Confirmation) -> dict[str, Any]:
    """Returns the fields and the kind as JSON; infinities and NaN become null.

    Raises ValueError for values that could not be read again, such as a negative speed.
    """
    values = {name: _plain(value) for name, value in confirmation_to_dict(confirmation).items()}
    if isinstance(confirmation, VariantMeasurement):
        values["measurement"] = measurement_values(confirmation.measurement)
    confirmation_from_values(values)
    return values


def confirmation_from_values(stored: Any) -> Confirmation:
    """Returns the confirmation of a JSON object.

    Raises ValueError, TypeError or InvalidInput where it is not a confirmation.
    """
    if not isinstance(stored, dict):
        raise ValueError(f"confirmation is {stored!r:.60}")
    if "measurement" in stored:
        measurement_from_values(stored["measurement"])  # raises where it is not a measurement
    confirmation = confirmation_from_dict(stored)
    check_types(confirmation)
    for name in _POSITIVE:
        value = getattr(confirmation, name, None)
        # Finite, too; a comparison takes integers of any size, which JSON may have.
        if value is not None and not 0 < value <= sys.float_info.max:
            raise ValueError(f"{name} is {value!r:.60}")
    if not 0 <= confirmation.seconds <= sys.float_info.max:
        raise ValueError(f"seconds is {confirmation.seconds!r:.60}")
    return confirmation


def confirmation_from_row(row: Any) -> Confirmation:
    """Returns the confirmation in a row of the confirmations table. Raises DamagedRow."""
    with _reading(f"confirmation {row.ordinal!r:.20}"):
        if type(row.ordinal) is not int:
            raise ValueError(f"ordinal is {row.ordinal!r:.60}")
        confirmation = confirmation_from_values(row.result)
        _check_fingerprint(confirmation.config, row)
        return confirmation
