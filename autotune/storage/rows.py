"""Converts dataclasses to rows of the tables and back; an unreadable row raises DamagedRow."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass, replace
from datetime import UTC, datetime
from typing import Any, get_args

from autotune.analysis.feasibility import is_feasible
from autotune.errors import InvalidInput
from autotune.spec.attempt import AttemptState, RunningAttempt
from autotune.spec.config import TrainingConfig
from autotune.spec.confirmation import (
    CONFIRMATION_KINDS,
    Confirmation,
    VariantMeasurement,
    confirmation_to_dict,
)
from autotune.spec.limits import Moment, Number, Seconds
from autotune.spec.prediction import Forecast
from autotune.spec.reading import check, fits, parse, possible, shown
from autotune.spec.result import Measurement, TrialRecord
from autotune.spec.search_space import check_space
from autotune.spec.study import StudyDefinition, check_device, check_study_name
from autotune.storage.stored_columns import check_decoded, check_depth
from autotune.storage.tables import SCHEMA_VERSION

_MEASUREMENT_FIELDS = tuple(field.name for field in fields(Measurement))
_DEFINITION_FIELDS = tuple(field.name for field in fields(StudyDefinition))
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
    except RecursionError:
        raise DamagedRow(f"{what} cannot be read: it is nested too deeply") from None
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
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
    """Returns the fields as JSON; what is not finite or not possible becomes null.

    JSON has neither infinities nor NaN, and a number out of its range could not be read again.
    """
    values = {name: getattr(measurement, name) for name in _MEASUREMENT_FIELDS}
    return {name: _plain(value) for name, value in possible(Measurement, values).items()}


def measurement_from_values(stored: Any) -> Measurement:
    """Returns the measurement of a JSON object, also of one that an earlier release wrote.

    Raises ValueError or TypeError where it is not a measurement.
    """
    return parse(Measurement, _measured_fields(stored))


def _measured_fields(stored: Any) -> dict[str, Any]:
    """Returns the fields of a measurement; infinities and NaN of older databases become None."""
    if not isinstance(stored, dict):
        raise ValueError(f"measurement is {shown(stored)}")
    for name in _ALWAYS_STORED:
        if name not in stored:
            raise ValueError(f"it has no {name!r}")
    return dict(finite_values(stored))


def finite_values(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a JSON object with null in place of infinities and NaN."""
    for value in stored.values():
        if value.__class__ is float and not math.isfinite(value):
            return {name: _plain(item) for name, item in stored.items()}
    return stored


def finite_seconds(seconds: float | None) -> float | None:
    """Returns None for infinities and NaN."""
    if isinstance(seconds, float) and not math.isfinite(seconds):
        return None
    return seconds


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, dict):
        return {name: item for name, item in value.items() if _plain(item) is not None}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
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
    with _reading(f"study {shown(row.name)}"):
        check_decoded(row, "workload", "space", "device", "unavailable", "created_at")
        check_study_name(row.name)  # it becomes the name of a folder and of files
        check_depth(row.workload, row.space)
        fields_of_row = {name: getattr(row, name) for name in _DEFINITION_FIELDS}
        definition = parse(StudyDefinition, fields_of_row)
        check_space(definition.space)
        check_device(definition.device.device)
        _check_number("trials_wanted", row.trials_wanted)
        return definition


def _check_number(name: str, value: object) -> None:
    """Raises ValueError unless the value of a column is a number of trials or the like."""
    if not fits(Number, value):
        raise ValueError(f"{name} is {shown(value)}")


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
    losses: Sequence[str] = (),
) -> TrialRecord:
    """Returns the trial in a row of the trials table. Raises DamagedRow.

    `cap_bytes` decides whether it is feasible. `losses` are why the machine ended its attempts.
    """
    with _reading(f"trial {shown(row.number)}"):
        check_decoded(row, "config", "measurement", "started_at", "finished_at")
        if row.measurement is None:
            message = _message_without_result(losses)
            measured = {"outcome": "interrupted", "message": message}
        else:
            measured = _measured_fields(row.measurement)
        record = parse(
            TrialRecord,
            {
                **measured,
                "number": row.number,
                "config": _config_from_row(row),
                "name": row.name,
                "predicted_peak_memory_bytes": (
                    None if predicted_bytes is None else int(predicted_bytes)
                ),
                "seconds": finite_seconds(row.seconds),
            },
        )
        return replace(record, feasible=is_feasible(record, cap_bytes=cap_bytes))


def _message_without_result(losses: Sequence[str]) -> str:
    if not losses:
        return "has no result yet"
    times = "1 time" if len(losses) == 1 else f"{len(losses)} times"
    return f"lost {times}, not by its own fault: {losses[-1]}"


def _text(value: object) -> str:
    """Returns a text that identifies a row as it is, and anything else as a message shows it."""
    return value if isinstance(value, str) and len(value) <= LONGEST_NAME else shown(value)


def _config_from_row(row: Any) -> TrainingConfig:
    config = TrainingConfig(**row.config)
    _check_fingerprint(config, row)
    return config


def _check_fingerprint(config: TrainingConfig, row: Any) -> None:
    if config.fingerprint != row.fingerprint:
        raise ValueError(
            f"its configuration has fingerprint {config.fingerprint}, not {_text(row.fingerprint)}"
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
    with _reading(f"prediction {_text(row.fingerprint)}"):
        check_decoded(row, "config", "prediction")
        config = _config_from_row(row)
        return parse(
            Forecast, {"config": config, "prediction": row.prediction, "error": row.refusal}
        )


# -- confirmations ---------------------------------------------------------------------------------


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
        raise ValueError(f"confirmation is {shown(stored)}")
    fields_of_kind = dict(stored)
    kind = fields_of_kind.pop("kind", None)
    if kind not in CONFIRMATION_KINDS:
        raise ValueError(f"there is no kind {kind!r:.60} of confirmation")
    if "measurement" in stored:
        fields_of_kind["measurement"] = _measured_fields(stored["measurement"])
    return parse(CONFIRMATION_KINDS[kind], fields_of_kind)


def confirmation_from_row(row: Any) -> Confirmation:
    """Returns the confirmation in a row of the confirmations table. Raises DamagedRow."""
    with _reading(f"confirmation {shown(row.ordinal)}"):
        check_decoded(row, "result", "created_at")
        _check_number("ordinal", row.ordinal)
        confirmation = confirmation_from_values(row.result)
        _check_fingerprint(confirmation.config, row)
        return confirmation


# -- attempts --------------------------------------------------------------------------------------


def running_attempt_from_row(row: Any) -> RunningAttempt:
    """Returns the attempt in a row with its trial's number. Raises DamagedRow."""
    with _reading(f"a running attempt at trial {shown(row.number)}"):
        attempt = RunningAttempt(
            id=row.id,
            number=row.number,
            worker=row.worker,
            renewals=row.renewals,
            is_expired=bool(row.expired),
        )
        check(attempt)
        return attempt


def check_attempt_row(row: Any) -> None:
    """Raises DamagedRow for a row of the attempts table that no release has written."""
    with _reading(f"attempt {shown(row.ordinal)}"):
        check_decoded(row, "measurement", "started_at", "ended_at")
        if row.state not in get_args(AttemptState):
            raise ValueError(f"there is no state {shown(row.state)}")
        _check_number("ordinal", row.ordinal)
        _check_number("renewals", row.renewals)
        if not fits(Moment, row.lease_until):
            raise ValueError(f"lease_until is {shown(row.lease_until)}")
        if row.seconds is not None and not fits(Seconds, row.seconds):
            raise ValueError(f"seconds is {shown(row.seconds)}")
        for name in ("id", "worker", "cause"):
            if not isinstance(getattr(row, name), str):
                raise ValueError(f"{name} is {shown(getattr(row, name))}")
        if row.measurement is not None:
            measurement_from_values(row.measurement)
